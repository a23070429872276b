// Observable Plot labels the groups of its marks; only with a role may a group have a label.
export function withGroupRoles<T extends Element>(drawing: T): T {
  for (const group of drawing.querySelectorAll("g[aria-label]"))
    group.setAttribute("role", "group");
  return drawing;
}
