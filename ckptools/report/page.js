// Sorts and filters the tables of a report, highlights everything about the rank or key under pointer or focus, and
// shows only one rank: the one whose cell in the map is clicked.
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

  const elementsAbout = new Map();
  const subjectsOf = new Map();
  function note(element, found) {
    subjectsOf.set(element, found);
    for (const subject of found) {
      if (!elementsAbout.has(subject)) elementsAbout.set(subject, []);
      elementsAbout.get(subject).push(element);
    }
  }
  const titleOf = (shape) => shape.querySelector("title").textContent;
  for (const shape of document.querySelectorAll(".ckpt svg rect:has(title)"))
    note(shape, subjects(titleOf(shape), titleOf(shape).split(": ")[0]));
  for (const row of document.querySelectorAll(".ckpt tbody tr")) {
    const key = row.querySelector(".k");
    const rank = row.querySelector("[data-t=rank]");
    note(row, subjects(row.textContent + (rank ? " rank " + rank.textContent : ""), key && key.textContent));
  }
  for (const cause of document.querySelectorAll(".ckpt .cause:not(.follows), .ckpt .follows code div"))
    note(cause, subjects(cause.textContent, ""));

  // Files of ranks and problems, and the ranks that each problem is about, as the JSON of the page has them.
  const told = (name) => JSON.parse(document.getElementById(name).textContent);
  const files = told("inspect").ranks;
  const problems = told("verify").checks.flatMap((check) => check.problems);
  const about = told("ranks").of_problems.map((ranks, n) => subjects(`ranks ${ranks}; ${problems[n].message}`, ""));
  for (const code of document.querySelectorAll(".ckpt .code")) {
    const ranks = problems.flatMap((problem, n) => (problem.code === code.id ? [...about[n]] : []));
    note(code, new Set(ranks));
  }

  let lit = [];
  function mark(at) {
    for (const element of lit) element.classList.remove("lit");
    lit = at && subjectsOf.has(at) ? [...subjectsOf.get(at)].flatMap((subject) => elementsAbout.get(subject)) : [];
    for (const element of lit) element.classList.add("lit");
  }
  for (const name of ["pointerover", "focusin"])
    document.addEventListener(name, (event) => mark(event.target.closest("rect, tbody tr, .cause")));

  // Tab focuses one element of a map, layout or table; arrows move on from there, in a map also up and down.
  function members(group) {
    return [...group.querySelectorAll("rect, tr")]
      .filter((one) => subjectsOf.has(one) && !one.hidden && !one.matches("tr.off"));
  }
  function tabTo(group) {
    members(group).forEach((one, n) => { one.tabIndex = n ? -1 : 0; });
  }
  for (const cause of document.querySelectorAll(".ckpt .cause:not(.follows)")) cause.tabIndex = 0;
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

  // A click on the cell of a rank, or Enter, pins it: all that is not about it goes away until the same again or Escape.
  const MOST = 200;
  const page = document.querySelector(".ckpt");
  const nav = page.querySelector("nav");
  const map = page.querySelector(".band svg");
  const cells = map ? [...map.querySelectorAll("rect:has(title)")].filter((one) => /^rank \d+:/.test(titleOf(one))) : [];
  let pinned = "";

  function made(tag, text, into) {
    const element = document.createElement(tag);
    element.textContent = text;
    into.append(element);
    return element;
  }
  const undo = made("button", "", nav);
  undo.className = "pin";
  undo.hidden = true;
  nav.prepend(undo);
  const panel = document.createElement("section");
  page.querySelector(".band").after(panel);

  function tell(rank) {
    panel.replaceChildren();
    if (!rank) return;
    made("h2", titleOf(cells.find((cell) => cell.matches("[aria-pressed=true]"))).split(";")[0], panel);
    for (const file of files.filter((one) => String(one.rank) === rank))
      made("div", `${file.file}: ${file.status}, ${file.bytes.toLocaleString("en")} B`, panel);
    const own = problems.filter((_, n) => about[n].has("rank " + rank));
    made("h3", own.length ? "problems: " + own.length : "no problem names it", panel);
    for (const one of own.slice(0, MOST))
      made("div", [one.code, one.tensor, one.message].filter(Boolean).join(" "), panel);
    if (own.length > MOST) made("div", `${own.length - MOST} more are in the JSON of this page`, panel);
  }

  function pin(subject) {
    pinned = subject === pinned ? "" : subject;
    const kept = new Set(elementsAbout.get(pinned) || []);
    const other = (element) => [...subjectsOf.get(element)].some((one) => one.startsWith("rank ")) && !kept.has(element);
    for (const element of subjectsOf.keys()) element.classList.toggle("off", pinned !== "" && other(element));
    for (const part of page.querySelectorAll(":scope > *, .ckpt-picture, .follows")) {
      const stays = [nav, panel].includes(part) || part.matches("style, .band");
      part.classList.toggle("off", pinned !== "" && !stays && ![...kept].some((one) => part.contains(one)));
    }
    for (const link of nav.querySelectorAll("a"))
      link.classList.toggle("off", pinned !== "" && document.querySelector(link.hash).closest(".off") !== null);
    for (const cell of cells) cell.setAttribute("aria-pressed", kept.has(cell));
    for (const body of page.querySelectorAll("tbody")) tabTo(body);
    undo.hidden = !pinned;
    undo.textContent = `only ${pinned}; Esc shows all`;
    tell(pinned.slice(5));
  }

  undo.addEventListener("click", () => pin(pinned));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && pinned) pin(pinned);
  });
  if (map) {
    map.setAttribute("role", "group");
    const hint = made("div", "click a rank, or press Enter on it, to see only what is about it", map.parentNode);
    hint.className = "dim hint";
  }
  for (const cell of cells) {
    cell.setAttribute("role", "button");
    cell.setAttribute("aria-label", titleOf(cell));
    cell.setAttribute("aria-pressed", "false");
    cell.addEventListener("click", () => pin(titleOf(cell).split(":")[0]));
    cell.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      pin(titleOf(cell).split(":")[0]);
    });
  }
})();
