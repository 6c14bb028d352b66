// The log of a job as it grows: follow, search, wrap, jump to the next error (the pattern of errors), at most 20,000 lines.
const WAIT_S = 20;
const MAX_LINES = 20000;
const ERROR = /(error|exception|traceback|fatal|killed|out of memory)\b/i;

function line(text) {
  const each = document.createElement("span");
  each.className = ERROR.test(text) ? "line error-line" : "line";
  each.textContent = text;
  return each;
}

class Log {
  constructor(box) {
    this.box = box;
    this.pre = box.querySelector("pre");
    this.follow = box.querySelector("[name=follow]");
    this.note = box.querySelector(".log-note");
    this.offset = Number(box.dataset.next);
    this.attempt = box.dataset.attempt;
    this.rest = "";
    this.at = -1;
    const shown = this.pre.textContent;
    this.pre.textContent = "";
    this.append(shown);
    box.querySelector("[name=wrap]").addEventListener("change", (event) => box.classList.toggle("wrap", event.target.checked));
    box.querySelector("[name=find]").addEventListener("input", (event) => this.find(event.target.value));
    box.querySelector("[name=find]").addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); this.step(event.shiftKey ? -1 : 1); } });
    box.querySelector("[data-jump]").addEventListener("click", () => this.jump());
    this.follow.addEventListener("change", () => this.toEnd());
    this.pre.addEventListener("scroll", () => { if (this.follow.checked && this.pre.scrollHeight - this.pre.scrollTop - this.pre.clientHeight > 80) this.follow.checked = false; });
    this.toEnd();
    this.run();
  }

  append(text) {
    const pieces = (this.rest + text).split("\n");
    this.rest = pieces.pop();
    const fragment = document.createDocumentFragment();
    for (const each of pieces) fragment.append(line(`${each}\n`));
    this.last?.remove();
    this.last = this.rest ? line(this.rest) : null;
    if (this.last) fragment.append(this.last);
    this.pre.append(fragment);
    while (this.pre.childElementCount > MAX_LINES) this.pre.firstElementChild.remove();
    this.toEnd();
  }

  toEnd() { if (this.follow.checked) this.pre.scrollTop = this.pre.scrollHeight; }

  async run() {
    while (this.box.isConnected) {
      if (document.hidden) { await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true })); continue; }
      try {
        const reply = await fetch(`${this.box.dataset.log}?attempt=${this.attempt}&offset=${this.offset}&wait_s=${WAIT_S}`);
        if (!reply.ok) throw new Error(reply.statusText);
        const text = await reply.text();
        this.offset = Number(reply.headers.get("X-Strata-Next"));
        if (text) this.append(text);
        if (reply.headers.get("X-Strata-Ended") === "true") { this.note.textContent = "ended"; return; }
        this.note.textContent = "live";
      } catch {
        this.note.textContent = "not connected";
        await new Promise((done) => setTimeout(done, 3000));
      }
    }
  }

  find(words) {
    for (const mark of this.pre.querySelectorAll("mark")) { const parent = mark.parentNode; mark.replaceWith(mark.textContent); parent.normalize(); }
    this.marks = [];
    this.at = -1;
    if (words.length < 2) { this.note.textContent = ""; return; }
    const wanted = words.toLowerCase();
    for (const each of this.pre.children) {
      const text = each.textContent;
      const found = text.toLowerCase().indexOf(wanted);
      if (found < 0) continue;
      const mark = document.createElement("mark");
      mark.textContent = text.slice(found, found + words.length);
      each.replaceChildren(text.slice(0, found), mark, text.slice(found + words.length));
      this.marks.push(mark);
      if (this.marks.length >= 2000) break;
    }
    this.note.textContent = `${this.marks.length} found`;
    this.step(1);
  }

  step(by) {
    if (!this.marks?.length) return;
    this.follow.checked = false;
    this.marks[this.at]?.classList.remove("current");
    this.at = (this.at + by + this.marks.length) % this.marks.length;
    this.marks[this.at].classList.add("current");
    this.show(this.marks[this.at]);
  }

  jump() {
    const errors = [...this.pre.querySelectorAll(".error-line")];
    if (!errors.length) { this.note.textContent = "no error here"; return; }
    this.follow.checked = false;
    const below = this.pre.scrollTop + 4;
    const next = errors.find((each) => each.offsetTop - this.pre.offsetTop > below + 4) ?? errors[0];
    this.bring(next, 4);
  }

  show(element) { this.bring(element, this.pre.clientHeight / 2); }

  bring(element, below) {
    this.pre.scrollTop = element.offsetTop - this.pre.offsetTop - below;
    // The log itself may lie below the end of the window.
    element.scrollIntoView({ block: "nearest" });
  }
}

export function startLogs() {
  for (const box of document.querySelectorAll(".log[data-log]")) {
    if (box.dataset.started) continue;
    box.dataset.started = "yes";
    new Log(box);
  }
}
