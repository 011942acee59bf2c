// The list of jobs, anew every few seconds; while the server is away it stays and says so.
const body = document.getElementById("jobs");
const live = document.getElementById("live");
const EVERY_MS = 2000;

function cell(row, text, kind = "td") {
  const one = row.appendChild(document.createElement(kind));
  one.textContent = text;
  return one;
}

function show(jobs) {
  const rows = jobs.map((job) => {
    const row = document.createElement("tr");
    const name = row.appendChild(document.createElement("th"));
    name.scope = "row";
    const link = name.appendChild(document.createElement("a"));
    link.href = job.address;
    link.textContent = job.job_id;
    for (const text of [job.service, job.state, `${Math.round(100 * job.progress_ratio)} %`, job.error_message || job.message, job.created_at]) cell(row, text);
    return row;
  });
  const focused = document.activeElement?.getAttribute?.("href");
  body.replaceChildren(...rows);
  if (focused) body.querySelector(`a[href="${CSS.escape(focused)}"]`)?.focus();
  body.closest("table").hidden = !jobs.length;
  const empty = document.getElementById("empty");
  if (empty) empty.hidden = jobs.length > 0;
}

async function turn() {
  try {
    const answer = await fetch("/jobs/list");
    if (answer.ok) { show(await answer.json()); live.textContent = "Newest first; the table follows by itself."; }
  } catch {
    live.textContent = "The server is away; the table goes on when it is back.";
  }
  setTimeout(turn, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}
setTimeout(turn, EVERY_MS);
