// How numbers are written, on the screen and on paper: one format for each kind of place.

// A weight or a statistic: three digits after the point. A larger number has fewer, a whole number of a count none.
export const shown = (value: number): string => {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  if (size < 0.0005) return value < 0 ? ">−0.001" : "<0.001";
  return (
    sign + (size < 1000 ? size.toFixed(3) : size.toLocaleString("en", { maximumFractionDigits: 0 }))
  );
};
// The same where whole numbers are counts: "12" and not "12.000".
export const counted = (value: number): string =>
  Number.isInteger(value) ? value.toLocaleString("en") : shown(value);
// A count with its noun: "1 head", "12,288 heads".
export const plural = (count: number, one: string, many = `${one}s`): string =>
  `${counted(count)} ${count === 1 ? one : many}`;
export const seconds = (value: number): string => `${+value.toFixed(2)} s`;
// The least and the greatest of some values.
export const rangeOf = (values: ArrayLike<number>): [number, number] =>
  Array.from(values).reduce<[number, number]>(
    ([low, high], value) => [Math.min(low, value), Math.max(high, value)],
    [Infinity, -Infinity],
  );
// A number at the tick of a scale, which is round by itself.
export const tick = (value: number): string =>
  value !== 0 && Math.abs(value) < 0.001
    ? value.toExponential(0).replace("e-", "e−")
    : String(+value.toPrecision(2)).replace("-", "−");
// All digits of a float32, for the tooltip of a number and for what is copied.
export const exact = (value: number): string => String(+value.toPrecision(6));
// A number in a cell: ".71", "1", and nothing where it would be ".00".
export const inCell = (value: number): string => {
  const size = Math.abs(value);
  const digits =
    size >= 0.995
      ? size < 1.005
        ? "1"
        : size.toFixed(1)
      : size < 0.005
        ? ""
        : size.toFixed(2).slice(1);
  return value < 0 && digits ? `−${digits}` : digits;
};
// A statistic in a cell: two digits after the point, none from 10 on.
export const statisticInCell = (value: number): string =>
  value.toFixed(Math.abs(value) >= 10 ? 0 : 2);
// A probability beside another one: two or three digits, so that a small change is seen.
export const probability = (share: number): string =>
  `${(100 * share).toPrecision(share < 0.1 ? 2 : 3)} %`;
