// A report in a frame is as high as what it holds; until it is there, that is said.
for (const frame of document.querySelectorAll("iframe.report")) {
  const fit = () => {
    const held = frame.contentDocument;
    if (held?.documentElement) frame.style.height = `${held.documentElement.scrollHeight + 8}px`;
  };
  const waiting = document.createElement("p");
  waiting.className = "hint";
  waiting.setAttribute("role", "status");
  waiting.textContent = "The report is being made: some seconds, where series are learned for it.";
  if (frame.contentDocument?.URL === "about:blank") frame.before(waiting);
  frame.addEventListener("load", () => {
    waiting.remove();
    fit();
    new ResizeObserver(fit).observe(frame.contentDocument.body);
  });
  if (frame.contentDocument?.readyState === "complete") fit();
}
