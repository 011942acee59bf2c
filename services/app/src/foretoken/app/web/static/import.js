// An import as it goes on; the page is loaded anew when it has ended.
const EVERY_MS = 700;
const watched = document.getElementById("watched");

async function look() {
  try {
    const answer = await fetch(watched.dataset.state);
    if (!answer.ok) throw new Error(answer.statusText);
    const found = await answer.json();
    document.getElementById("progress").value = found.progress_ratio;
    document.getElementById("message").textContent = found.message;
    if (found.is_final) { location.reload(); return; }
  } catch {
    document.getElementById("message").textContent = "The server is away, and the import with it.";
  }
  setTimeout(look, EVERY_MS);
}
setTimeout(look, EVERY_MS);
