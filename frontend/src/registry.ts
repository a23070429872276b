// The views of the page. Each file of views/ holds one: the name of the file is the name of the view in the address and
// on its tab, and its `view` says the rest. The build registers all files of the folder; nothing else lists them.
import type { Context, Panel } from "./context";
import type { State } from "./state";

export interface View {
  name?: string; // on its tab, if it is not that of the file
  place: number; // among the tabs: the view with the least place is the first, and the key 1 opens it
  make(context: Context): Panel;
  figure?: string; // panels of the figure sheet, with commas: what its print and the sheet start with
  hasNoHead?: boolean | ((state: State) => boolean); // what the frame says of a head, it says itself
  keys?: [string, string][]; // of this view: each with its effect
  isOffered?(context: Context): boolean; // only some texts have it
  hasTab?(context: Context): boolean; // only some texts have its tab; a link leads to it anyway
}

const registered = new Map<string, View>();
export const register = (name: string, view: View) => void registered.set(name, view);
export const isView = (name: string) => registered.has(name);
// Whether the frame shows no chooser of a layer and a head.
export function isWithoutHead(state: State): boolean {
  const { hasNoHead = false } = viewOf(state.view);
  return typeof hasNoHead === "boolean" ? hasNoHead : hasNoHead(state);
}
export const viewOf = (name: string): View => registered.get(name)!;

export const nameOf = (view: string): string =>
  viewOf(view).name ?? view[0].toUpperCase() + view.slice(1);

// The names of the views of a page, in the order of their tabs.
export const offeredViews = (context: Context): string[] =>
  [...registered]
    .filter(([, { isOffered }]) => isOffered?.(context) ?? true)
    .sort(([, one], [, other]) => one.place - other.place)
    .map(([name]) => name);
export const viewsWithTab = (context: Context): string[] =>
  offeredViews(context).filter(
    (name) => name === context.state.view || (viewOf(name).hasTab?.(context) ?? true),
  );
