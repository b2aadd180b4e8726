"use strict";
(() => {
  const table = document.querySelector("#items table");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const tools = document.querySelector("#items .tools");
  const [text, kind, state] = tools.querySelectorAll("input, select");
  const shown = tools.querySelector("output");
  const words = rows.map((row) => row.textContent.toLowerCase());

  function filter() {
    const wanted = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row, i) => {
      const fits = (!kind.value || row.dataset.kind === kind.value) && (!state.value || row.className === state.value);
      row.hidden = !(fits && wanted.every((word) => words[i].includes(word)));
      count += !row.hidden;
    });
    shown.textContent = `${count.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
  }

  function sort(header) {
    const column = header.cellIndex;
    const down = header.getAttribute("aria-sort") === "ascending";
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      return header.classList.contains("n") ? x - y : x.localeCompare(y, "en", { numeric: true });
    };
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...[...body.rows].sort((a, b) => (down ? -order(a, b) : order(a, b))));
  }

  function reveal() {
    const row = document.getElementById(location.hash.slice(1));
    if (row && row.hidden) {
      text.value = kind.value = state.value = "";
      filter();
      row.scrollIntoView({ block: "center" });
    }
  }

  for (const control of [text, kind, state]) control.addEventListener("input", filter);
  for (const header of table.tHead.rows[0].cells) header.addEventListener("click", () => sort(header));
  addEventListener("hashchange", reveal);
  tools.hidden = false;
  filter();
})();
