// Scripts of every page: ages that grow, copy buttons, questions before an action, keys. It starts live content, plots,
// logs and parallel coordinates; every page also works without it.
import { startLive } from "./live.js";
import { drawPlots } from "./plots.js";
import { startLogs } from "./log.js";

document.documentElement.classList.add("js");

const UNITS = [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]];

export function duration(seconds) {
  const whole = Math.round(Math.max(0, seconds));
  for (const [unit, name, next, following] of UNITS) {
    if (whole >= unit) {
      const rest = Math.floor((whole % unit) / next);
      return `${Math.floor(whole / unit)} ${name}${rest ? ` ${rest} ${following}` : ""}`;
    }
  }
  return `${whole} s`;
}

// Ages grow while a page stands still.
function updateAges() {
  for (const each of document.querySelectorAll("time[data-age]")) {
    const ago = (Date.now() - Date.parse(each.dateTime)) / 1000;
    const words = each.dataset.age === "since" ? duration(ago) : ago >= 0 ? `${duration(ago)} ago` : `in ${duration(-ago)}`;
    if (each.textContent !== words) each.textContent = words;
    if (!each.dataset.local) {
      each.title = `${new Date(each.dateTime).toLocaleString()} (${each.title})`;
      each.dataset.local = "yes";
    }
  }
}

function copy(button) {
  navigator.clipboard.writeText(button.dataset.copy).then(() => {
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

// Actions that ask first: the question of the form in a dialog.
function confirmForm(event) {
  const form = event.target;
  const question = form.elements.namedItem("question");
  if (!question || form.elements.namedItem("confirmed")) return;
  event.preventDefault();
  const dialog = document.createElement("dialog");
  dialog.setAttribute("aria-labelledby", "question");
  const title = document.createElement("h2");
  title.id = "question";
  title.textContent = question.value;
  const buttons = document.createElement("div");
  buttons.className = "buttons";
  const keep = document.createElement("button");
  keep.textContent = "Back";
  keep.addEventListener("click", () => dialog.close());
  const go = document.createElement("button");
  go.textContent = form.elements.namedItem("label").value;
  go.className = form.querySelector("button").classList.contains("danger") ? "danger primary" : "primary";
  go.addEventListener("click", () => {
    const yes = document.createElement("input");
    Object.assign(yes, { type: "hidden", name: "confirmed", value: "1" });
    form.append(yes);
    go.disabled = true;
    form.requestSubmit();
  });
  buttons.append(keep, go);
  dialog.append(title, buttons);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  go.focus();
}

function onKey(event) {
  const typing = event.target.closest("input, textarea, select, [contenteditable]");
  const alone = !typing && !event.ctrlKey && !event.metaKey && !event.altKey;
  if (event.key === "/" && alone) {
    event.preventDefault();
    document.getElementById("search")?.focus();
  }
  const turn = { j: "next", k: "prev" }[event.key];
  if (turn && alone) document.querySelector(`#content a[rel="${turn}"]`)?.click();
  if (event.key === "Escape") for (const each of document.querySelectorAll(".user[open], .rail details[open]")) each.open = false;
}

function onContent() {
  updateAges();
  drawPlots();
  startLogs();
  if (document.querySelector(".parallel")) import("./parallel.js").then((module) => module.drawParallel());
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
  for (const each of document.querySelectorAll(".user[open], .rail details[open]")) if (!each.contains(event.target)) each.open = false;
});
document.addEventListener("submit", confirmForm);
document.addEventListener("change", (event) => { if (event.target.matches("[data-submit]")) event.target.form.requestSubmit(); });
document.addEventListener("keydown", onKey);
onContent();
startLive(onContent);
setInterval(updateAges, 1000);
