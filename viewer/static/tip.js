// The one tooltip of the page.

import { append } from "./dom.js";

export function showTip(event, ...content) {
  const tip = document.getElementById("tip");
  tip.replaceChildren();
  append(tip, content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const anchor = event.clientX === undefined || event.type === "focus" ? corner(event.target) : event;
  const left = Math.min(anchor.clientX + 14, window.innerWidth - box.width - 8);
  const below = anchor.clientY + 18;
  const top = below + box.height > window.innerHeight - 8 ? anchor.clientY - box.height - 14 : below;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

export function hideTip() {
  document.getElementById("tip").hidden = true;
}

function corner(target) {
  const box = target.getBoundingClientRect();
  return { clientX: box.left, clientY: box.bottom };
}
