// Sorts and filters the tables of a report, and highlights everything about the rank or key under pointer or focus.
"use strict";
(() => {
  const UNITS = {KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, k: 1e3, M: 1e6, T: 1e12};
  const NUMBER = /^(-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)(?: (\w+))?/;

  // A cell as a number: `12.5 KiB`, `6.74 B` (billions, but bytes in a column of sizes); null for other texts.
  function numberOf(text, sizes) {
    const found = NUMBER.exec(text);
    if (!found) return null;
    const unit = found[2] === "B" ? (sizes ? 1 : 1e9) : UNITS[found[2]] || 1;
    return parseFloat(found[1].replace(/,/g, "")) * unit;
  }

  function sortBy(table, head, column) {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [row.cells[column].textContent, row]);
    const sizes = rows.some(([text]) => / [KMGT]iB/.test(text));
    const keys = rows.map(([text, row]) => ({text, row, number: numberOf(text, sizes)}));
    const sign = down ? -1 : 1;  // other texts come after the numbers in both orders
    keys.sort((a, b) =>
      a.number !== null && b.number !== null ? sign * (a.number - b.number)
      : a.number !== null ? -1 : b.number !== null ? 1
      : sign * (a.text < b.text ? -1 : a.text > b.text ? 1 : 0));
    body.append(...keys.map((key) => key.row));
    tabTo(body);
  }

  function filter(table, text) {
    for (const row of table.tBodies[0].rows) row.hidden = !row.textContent.toLowerCase().includes(text.toLowerCase());
    tabTo(table.tBodies[0]);
  }

  for (const table of document.querySelectorAll(".ckpt table")) {
    if (!table.tHead.rows[0].cells[0].textContent) continue;  // only the first row of a fact has its name
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.tabIndex = 0;
      head.addEventListener("click", () => sortBy(table, head, column));
      head.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        sortBy(table, head, column);
      });
    });
    if (table.tBodies[0].rows.length < 4) continue;
    const input = document.createElement("input");
    input.type = "search";
    input.className = "find";
    input.placeholder = "filter";
    input.setAttribute("aria-label", "filter the rows");
    input.addEventListener("input", () => filter(table, input.value));
    table.parentNode.before(input);
  }

  // The ranks and the key that an element is about: `rank 3` for each rank in its words.
  function subjects(words, key) {
    const found = new Set(key ? ["key " + key] : []);
    for (const [, spans] of words.matchAll(/\branks? ((?:\d+(?:\.\.\d+)?(?:, )?)+)/g)) {
      for (const span of spans.split(", ")) {
        const [first, last] = span.split("..").map(Number);
        for (let n = first; n <= Math.min(last || first, first + 5000); n++) found.add("rank " + n);
      }
    }
    return found;
  }

  const about = new Map();
  const of = new Map();
  function note(element, found) {
    of.set(element, found);
    for (const subject of found) {
      if (!about.has(subject)) about.set(subject, []);
      about.get(subject).push(element);
    }
  }
  for (const shape of document.querySelectorAll(".ckpt svg rect")) {
    const title = shape.querySelector("title");
    if (title) note(shape, subjects(title.textContent, title.textContent.split(": ")[0]));
  }
  for (const row of document.querySelectorAll(".ckpt tbody tr")) {
    const key = row.querySelector(".k");
    note(row, subjects(row.textContent, key && key.textContent));
  }
  for (const cause of document.querySelectorAll(".ckpt .cause")) note(cause, subjects(cause.textContent, ""));

  let lit = [];
  function mark(at) {
    for (const element of lit) element.classList.remove("lit");
    lit = at && of.has(at) ? [...of.get(at)].flatMap((subject) => about.get(subject)) : [];
    for (const element of lit) element.classList.add("lit");
  }
  for (const name of ["pointerover", "focusin"])
    document.addEventListener(name, (event) => mark(event.target.closest("rect, tbody tr, .cause")));

  // Tab focuses one element of a map, layout or table; arrows move on from there, in a map also up and down.
  function members(group) {
    return [...group.querySelectorAll("rect, tr")].filter((one) => of.has(one) && !one.hidden);
  }
  function tabTo(group) {
    members(group).forEach((one, n) => { one.tabIndex = n ? -1 : 0; });
  }
  for (const cause of document.querySelectorAll(".ckpt .cause")) cause.tabIndex = 0;
  for (const group of document.querySelectorAll(".ckpt svg, .ckpt tbody")) {
    tabTo(group);
    group.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      const all = members(group);
      const at = all.indexOf(document.activeElement);
      if (!step || at < 0) return;
      const across = event.key === "ArrowRight" || event.key === "ArrowLeft";
      let n = at + step;
      while (all[n] && !across && all[n].getAttribute("x") !== all[at].getAttribute("x")) n += step;
      if (all[n]) {
        event.preventDefault();
        all[n].focus();
      }
    });
  }
})();
