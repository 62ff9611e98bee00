// Numbers as people read them.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(size >= 100 ? 1 : digits);
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
}

export function percent(share) {
  return `${Math.round(100 * share)} %`;
}

export function plural(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}
