"use strict";
const tip = document.getElementById("tip");
let shown = null;

function show(cell) {
  shown = cell;
  tip.hidden = !cell;
  if (!cell) return;
  tip.textContent = cell.querySelector(".heard").textContent;
  tip.style.left = 0;  // where it is as wide as it likes
  const at = cell.getBoundingClientRect();
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(8, Math.min(at.left, room)) + "px";
  const above = at.top - tip.offsetHeight - 6;
  tip.style.top = (above > 0 ? above : at.bottom + 6) + "px";
}

const cellOf = (event) => event.target.closest?.("td.mark");
document.addEventListener("mouseover", (event) => show(cellOf(event)));
document.addEventListener("focusin", (event) => show(cellOf(event)));
document.addEventListener("focusout", () => show(null));
// A cell that gets the focus is scrolled into view after that.
document.addEventListener("scroll", () => show(shown), { capture: true, passive: true });

for (const grid of document.querySelectorAll("table[role=grid]")) {
  const rows = [...grid.tBodies[0].rows].map((row) => [...row.querySelectorAll("td.mark")]);
  let current = rows.find((row) => row.length)?.[0];
  if (current) current.tabIndex = 0;
  const enter = (cell) => {
    current.tabIndex = -1;
    cell.tabIndex = 0;
    current = cell;
  };
  grid.addEventListener("focusin", (event) => {
    const cell = cellOf(event);
    if (cell) enter(cell);
  });
  grid.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return show(null);
    const y = rows.findIndex((row) => row.includes(current));
    const x = rows[y].indexOf(current);
    const last = (row) => Math.min(x, row.length - 1);
    const next = {
      ArrowLeft: () => rows[y][x - 1],
      ArrowRight: () => rows[y][x + 1],
      ArrowUp: () => rows[y - 1]?.[last(rows[y - 1])],
      ArrowDown: () => rows[y + 1]?.[last(rows[y + 1])],
      Home: () => rows[y][0],
      End: () => rows[y].at(-1),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const cell = next();
    if (!cell) return;
    // A window that is not in front hears of no focus until it is.
    enter(cell);
    cell.focus();
    show(cell);
  });
}
