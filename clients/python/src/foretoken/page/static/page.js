// Draws charts and lets tables sort and filter: of a written page, or of blocks put into a live one.
// `foretoken.enhance(element)` does both for what is inside an element. Nothing is fetched.
"use strict";
window.foretoken = (() => {
  // Above so many points a canvas is quicker than a picture of elements.
  const CANVAS_POINTS = 2000;
  const ROWS_SHOWN = 200;
  const THINNING_DELAY_MS = 60;
  // Points are larger than a pixel of a screen: those in one box of so many pixels a side hide each
  // other. Boxes grow until so few points are left that zooming feels immediate.
  const THINNING_PX = [1, 2, 3, 4, 6, 8];
  const MOST_POINTS = 8000;

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
      // As many as there is room for: numbers are wider than they are high.
      axisX: { tickCount: { expr: "ceil(width / 90)" }, labelFlush: false },
      legend: { ...text, labelColor: ink },
      text: { color: ink },
      rule: { color: ink },
      view: { stroke: null },
    };
  };

  const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const TENTHS = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  // Numbers as `foretoken.page.block.number_text` writes them.
  const numberText = (value, unit) => {
    if (value === null || value === undefined) return "-";
    if (typeof value !== "number") return String(value);
    if (unit === "share") return TENTHS.format(100 * value) + "%";
    if (Number.isInteger(value) || Math.abs(value) >= 100) return WHOLE.format(value);
    return Number(value.toPrecision(3)).toString();
  };

  const records = (table) =>
    table.rows.map((row, place) => {
      const record = { _row: place };
      table.columns.forEach((column, index) => { record[column.name] = row[index]; });
      return record;
    });

  // Of points in one box the first stays; those outside of the domains go.
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
      return (value) => ((at(value) - low) / (high - low || 1)) * size;
    };
    const placeX = place(x, width), placeY = place(y, height);
    const inside = [];
    for (const point of points) {
      const across = placeX(point[x]), up = placeY(point[y]);
      if (across >= 0 && across <= width && up >= 0 && up <= height) inside.push([point, across, up]);
    }
    let shown = inside;
    for (const size of THINNING_PX) {
      const seen = new Set();
      shown = shown.filter(([, across, up]) => {
        const key = Math.floor(across / size) * 100003 + Math.floor(up / size);
        return !seen.has(key) && seen.add(key);
      });
      if (shown.length <= MOST_POINTS) break;
    }
    return shown.map(([point]) => point);
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

  const blocks = new WeakMap();
  const readBlock = (element) => {
    if (!blocks.has(element)) blocks.set(element, JSON.parse(element.querySelector('script[type="application/json"]').textContent));
    return blocks.get(element);
  };

  // Texts that begin with a number sort by it; ranks that are ties have `=` before them.
  const NUMBER = /^[=+<>~]*(-?[\d,]*\.?\d+)/;
  const valueOf = (cell) => {
    if ("value" in cell.dataset) return Number(cell.dataset.value);
    const match = cell.classList.contains("text") ? null : NUMBER.exec(cell.textContent);
    return match ? Number(match[1].replaceAll(",", "")) : cell.textContent;
  };

  const readRows = (table) =>
    [...table.tBodies[0].rows].map((element) => ({ element, values: [...element.cells].map(valueOf) }));

  const makeRow = (block, row) => {
    const line = document.createElement("tr");
    row.values.forEach((value, place) => {
      const item = document.createElement(place ? "td" : "th");
      if (!place) item.scope = "row";
      const column = block.columns[place], tone = block.tones[row.place + "," + place];
      item.className = [tone && "tone-" + tone, column.is_text && "text"].filter(Boolean).join(" ");
      item.textContent = numberText(value, column.unit);
      line.append(item);
    });
    return line;
  };

  const ORDER = new Intl.Collator("en", { numeric: true });
  const compare = (one, other) => {
    const isNumber = typeof one === "number", isOther = typeof other === "number";
    if (isNumber && isOther) return one - other;
    if (isNumber !== isOther) return isNumber ? -1 : 1;
    return ORDER.compare(String(one ?? ""), String(other ?? ""));
  };

  // A table's state is in its own figure: the rows, the column it is sorted by, what is looked for.
  const enliven = (figure) => {
    const table = figure.querySelector("table");
    const chart = figure.closest("figure.chart");
    const block = chart ? readBlock(chart).table : "long" in figure.dataset ? readBlock(figure) : null;
    let rows = null;
    const state = { by: -1, sign: 1, wanted: "", limit: ROWS_SHOWN };
    const status = figure.querySelector(".count");
    const has = (row, wanted) =>
      row.element ? row.element.textContent.toLowerCase().includes(wanted)
        : row.values.some((value) => typeof value === "string" && value.toLowerCase().includes(wanted));
    const show = () => {
      rows = rows || (block ? block.rows.map((values, place) => ({ values, place })) : readRows(table));
      const wanted = state.wanted.toLowerCase();
      let found = wanted ? rows.filter((row) => has(row, wanted)) : rows;
      if (state.by >= 0) found = [...found].sort((a, b) => state.sign * compare(a.values[state.by], b.values[state.by]));
      const body = document.createElement("tbody");
      for (const row of found.slice(0, state.limit)) body.append(row.element || makeRow(block, row));
      table.tBodies[0].replaceWith(body);
      if (status) {
        status.textContent = `${WHOLE.format(Math.min(found.length, state.limit))} of ${WHOLE.format(found.length)} rows`;
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
