// Builds elements. Text only ever becomes a text node: nothing in this page parses HTML, so nothing a model wrote can run.

const SVG = "http://www.w3.org/2000/svg";

/** el("p", {class: "hint"}, "text", node, ...): functions become listeners, `style` is an object, null children vanish. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name === "style") Object.entries(value).forEach(([key, one]) => node.style.setProperty(key, one));
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

export function append(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

export function link(page, params, ...children) {
  return el("a", { href: address(page, params) }, ...children);
}

export function address(page, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

/** rows: a list of [label, value]; values that are missing are left out. */
export function facts(rows) {
  const shown = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, shown.map(([label, value]) => [el("dt", {}, label), el("dd", {}, value)]));
}

export function select(label, options, chosen, change) {
  const choices = Object.entries(options).map(([value, text]) => el("option", { value, selected: value === chosen }, text));
  const box = el("select", { "aria-label": label, change: (event) => change(event.target.value) }, choices);
  return el("label", { class: "control" }, label, box);
}

export function checkbox(label, checked, change) {
  const box = el("input", { type: "checkbox", checked, change: (event) => change(event.target.checked) });
  return el("label", { class: "control" }, box, label);
}
