"use strict";
// The values of a chart's points: under the pointer, and with the arrow keys, Home and End.
for (const figure of document.querySelectorAll("figure[data-points]")) {
  const points = JSON.parse(figure.dataset.points);
  const plot = figure.querySelector(".plot");
  const [, , width, height] = plot.querySelector("svg").getAttribute("viewBox").split(" ").map(Number);
  const reader = document.createElement("div");
  const dot = document.createElement("i");
  const tip = document.createElement("span");
  reader.className = "reader";
  dot.className = "dot-mark";
  tip.className = "tip";
  reader.append(dot, tip);
  plot.append(reader);
  let at = -1;
  const show = (index) => {
    at = index;
    reader.classList.toggle("on", at >= 0);
    if (at < 0) return;
    const [x, y, words] = points[at];
    const left = x / width;
    dot.style.left = tip.style.left = `${100 * left}%`;
    dot.style.top = tip.style.top = `${100 * y / height}%`;
    tip.style.translate = `${-100 * left}% ${y / height < 0.35 ? ".8rem" : "calc(-100% - .8rem)"}`;
    tip.textContent = words;
    reader.setAttribute("aria-valuenow", at + 1);
    reader.setAttribute("aria-valuetext", words);
  };
  const attributes = {role: "slider", tabindex: 0, "aria-valuemin": 1, "aria-valuemax": points.length, "aria-valuenow": 1,
    "aria-label": `Values of: ${figure.querySelector("figcaption b").textContent}`, "aria-valuetext": points[0][2]};
  for (const [name, value] of Object.entries(attributes)) reader.setAttribute(name, value);
  reader.addEventListener("pointermove", (event) => {
    const box = reader.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * width, y = (event.clientY - box.top) / box.height * height;
    // Along a curve the step counts; points above each other are told apart by their height. Of rows the height counts.
    const [across, up] = "rows" in figure.dataset ? [0.001, 1] : [1, 0.06];
    const far = ([px, py]) => across * (px - x) ** 2 + up * (py - y) ** 2;
    show(points.reduce((best, point, index) => far(point) < far(points[best]) ? index : best, 0));
  });
  reader.addEventListener("pointerleave", () => show(-1));
  reader.addEventListener("focus", () => show(Math.max(at, 0)));
  reader.addEventListener("blur", () => show(-1));
  reader.addEventListener("keydown", (event) => {
    const last = points.length - 1, far = Math.max(1, Math.round(points.length / 20));
    const steps = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: far, PageDown: -far, Home: -last, End: last};
    if (event.key === "Escape") return show(-1);
    if (!(event.key in steps)) return;
    event.preventDefault();
    show(Math.min(last, Math.max(0, at + steps[event.key])));
  });
}
