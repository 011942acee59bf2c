// Draws charts and lets tables sort and filter: of a written page, or of blocks put into a live one.
// `foretoken.enhance(element)` does both for what is inside an element. Nothing is fetched.
"use strict";
window.foretoken = (() => {
  // Above so many points a canvas is quicker than a picture of elements.
  const CANVAS_POINTS = 2000;
  const ROWS_SHOWN = 200;
  const THINNING_DELAY_MS = 60;
  // Points are larger than a pixel of a screen: those in one box of so many pixels a side hide each other.
  const THINNING_PX = 2;

  const config = () => {
    const style = getComputedStyle(document.documentElement);
    const soft = style.getPropertyValue("--soft").trim();
    const ink = style.getPropertyValue("--ink").trim();
    const line = style.getPropertyValue("--line").trim();
    const text = { labelColor: soft, titleColor: soft, labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal" };
    return {
      background: null,
      font: "system-ui, sans-serif",
      axis: { ...text, gridColor: line, domainColor: line, tickColor: line },
      legend: { ...text, labelColor: ink },
      text: { color: ink },
      rule: { color: ink },
      view: { stroke: null },
    };
  };

  // Numbers as `foretoken.page.block.number_text` writes them.
  const numberText = (value, unit) => {
    if (value === null || value === undefined) return "-";
    if (typeof value !== "number") return String(value);
    if (unit === "share") return (100 * value).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) + "%";
    if (Number.isInteger(value) || Math.abs(value) >= 100) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return Number(value.toPrecision(3)).toString();
  };

  const records = (table) =>
    table.rows.map((row, place) => {
      const record = { _row: place };
      table.columns.forEach((column, index) => { record[column.name] = row[index]; });
      return record;
    });

  // Of points on one pixel the first stays; those outside of the domains go.
  const thin = (points, [x, y], domains, width, height) => {
    const place = (name, size) => {
      let low = Infinity, high = -Infinity;
      if (domains[name]) [low, high] = domains[name];
      else for (const point of points) {
        const value = point[name];
        if (value !== null && value < low) low = value;
        if (value !== null && value > high) high = value;
      }
      const isLog = low > 0 && high / low > 40;
      const at = isLog ? Math.log : Number;
      low = at(low); high = at(high);
      return (value) => Math.round(((at(value) - low) / (high - low || 1)) * size);
    };
    width /= THINNING_PX;
    height /= THINNING_PX;
    const placeX = place(x, width), placeY = place(y, height);
    const seen = new Set();
    return points.filter((point) => {
      const across = placeX(point[x]), up = placeY(point[y]);
      if (!(across >= 0 && across <= width && up >= 0 && up <= height)) return false;
      const key = across * 100003 + up;
      if (seen.has(key)) return false;
      seen.add(key);
      return true;
    });
  };

  // The row of the table that a mark stands for, numbers as the table writes them.
  const tell = (table) => {
    const box = document.getElementById("tooltip") || document.body.appendChild(document.createElement("div"));
    box.id = "tooltip";
    box.hidden = true;
    return (_handler, event, item, value) => {
      box.hidden = !value;
      if (!value) return;
      const lines = document.createElement("dl");
      for (const column of table.columns) {
        const [name, text] = [document.createElement("dt"), document.createElement("dd")];
        name.textContent = column.title;
        text.textContent = numberText(item.datum[column.name], column.unit);
        lines.append(name, text);
      }
      box.replaceChildren(lines);
      const [x, y] = [event.clientX + 12, event.clientY + 12];
      box.style.left = Math.min(x, innerWidth - box.offsetWidth - 4) + "px";
      box.style.top = Math.min(y, innerHeight - box.offsetHeight - 4) + "px";
    };
  };

  const draw = async (figure, block) => {
    const element = figure.querySelector(".plot");
    const all = records(block.table);
    const isThinned = block.thinned.length > 0 && all.length > CANVAS_POINTS;
    const width = element.clientWidth || 800, height = block.spec.height;
    const values = isThinned ? thin(all, block.thinned, {}, width, height) : all;
    const spec = { ...block.spec, data: { name: "table", values }, config: config(), description: block.caption || block.title };
    const renderer = values.length > CANVAS_POINTS ? "canvas" : "svg";
    const result = await vegaEmbed(element, spec, {
      renderer, actions: false, ast: true, defaultStyle: false, tooltip: tell(block.table),
    });
    figure.view = result.view;
    // A chart is one image with a label, and a table for those who do not see it.
    for (const drawn of element.querySelectorAll("svg, canvas")) drawn.setAttribute("aria-hidden", "true");
    if (!isThinned) return;
    let timer = 0;
    result.view.addSignalListener("zoom", (_, domains) => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        const shown = thin(all, block.thinned, domains || {}, width, height);
        result.view.data("table", shown).runAsync();
      }, THINNING_DELAY_MS);
    });
  };

  const readBlock = (element) => JSON.parse(element.querySelector('script[type="application/json"]').textContent);

  // Texts that begin with a number sort by it; ranks that are ties have `=` before them.
  const NUMBER = /^[=+<>~]*(-?[\d,]*\.?\d+)/;
  const valueOf = (cell) => {
    if ("value" in cell.dataset) return Number(cell.dataset.value);
    const match = cell.classList.contains("text") ? null : NUMBER.exec(cell.textContent);
    return match ? Number(match[1].replaceAll(",", "")) : cell.textContent;
  };

  const readRows = (table) =>
    [...table.tBodies[0].rows].map((element) => {
      const row = [...element.cells].map((cell) => ({ text: cell.textContent, value: valueOf(cell) }));
      return Object.assign(row, { element });
    });

  const rowsOfBlock = (block) =>
    block.rows.map((row, place) => row.map((value, index) => {
      const column = block.columns[index];
      const tone = block.tones[place + "," + index];
      const names = [tone ? "tone-" + tone : "", column.is_text ? "text" : ""];
      return { text: numberText(value, column.unit), value: value === null ? "" : value, tone: names.join(" ").trim() };
    }));

  const compare = (one, other) => {
    const isNumber = typeof one === "number", isOther = typeof other === "number";
    if (isNumber && isOther) return one - other;
    if (isNumber !== isOther) return isNumber ? -1 : 1;
    return String(one).localeCompare(String(other), "en", { numeric: true });
  };

  // A table's state is in its own figure: the rows, the column it is sorted by, what is looked for.
  const enliven = (figure) => {
    const table = figure.querySelector("table");
    const chart = figure.closest("figure.chart");
    const block = chart ? readBlock(chart).table : "long" in figure.dataset ? readBlock(figure) : null;
    const rows = block ? rowsOfBlock(block) : readRows(table);
    const state = { by: -1, sign: 1, wanted: "", limit: ROWS_SHOWN };
    const status = figure.querySelector(".count");
    const show = () => {
      const wanted = state.wanted.toLowerCase();
      let found = wanted ? rows.filter((row) => row.some((cell) => cell.text.toLowerCase().includes(wanted))) : rows;
      if (state.by >= 0) found = [...found].sort((a, b) => state.sign * compare(a[state.by].value, b[state.by].value));
      const body = document.createElement("tbody");
      for (const row of found.slice(0, state.limit)) {
        if (row.element) { body.append(row.element); continue; }
        const line = body.insertRow();
        row.forEach((cell, place) => {
          const item = document.createElement(place ? "td" : "th");
          if (!place) item.scope = "row";
          item.textContent = cell.text;
          if (cell.tone) item.className = cell.tone;
          line.append(item);
        });
      }
      table.tBodies[0].replaceWith(body);
      if (status) {
        status.textContent = `${Math.min(found.length, state.limit).toLocaleString("en")} of ${found.length.toLocaleString("en")} rows`;
        figure.querySelector(".more").hidden = found.length <= state.limit;
      }
    };
    [...table.tHead.rows[0].cells].forEach((header, place) => {
      if (!header.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => {
        state.sign = state.by === place ? -state.sign : 1;
        state.by = place;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", state.sign > 0 ? "ascending" : "descending");
        show();
      });
    });
    const tools = figure.querySelector(".tools");
    if (!tools) return;
    tools.hidden = false;
    tools.querySelector("input").addEventListener("input", (event) => { state.wanted = event.target.value; show(); });
    tools.querySelector(".more").addEventListener("click", () => { state.limit += ROWS_SHOWN; show(); });
  };

  const drawAll = (root) => {
    for (const figure of root.querySelectorAll("figure.chart")) draw(figure, readBlock(figure));
  };

  const enhance = (root) => {
    for (const figure of root.querySelectorAll(".table")) enliven(figure);
    drawAll(root);
  };

  // Colours of another scheme, and those of paper, need the charts anew.
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", () => drawAll(document));
  }
  return { enhance, numberText, thin };
})();
document.addEventListener("DOMContentLoaded", () => window.foretoken.enhance(document));
