// A report in a frame is as high as what it holds.
for (const frame of document.querySelectorAll("iframe.report")) {
  const fit = () => {
    const held = frame.contentDocument;
    if (held?.documentElement) frame.style.height = `${held.documentElement.scrollHeight + 8}px`;
  };
  frame.addEventListener("load", () => {
    fit();
    new ResizeObserver(fit).observe(frame.contentDocument.body);
  });
  if (frame.contentDocument?.readyState === "complete") fit();
}
