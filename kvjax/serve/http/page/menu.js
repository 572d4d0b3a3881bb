// The menu of policies: each with its name, what it is made of, and a line about it.
import {make} from "./draw.js";

export class Menu {
  constructor(dialog) {
    this.dialog = dialog;
    this.list = dialog.querySelector("ul");
    this.find = dialog.querySelector("input");
    this.choose = null;
    this.find.addEventListener("input", () => this.#narrow());
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  }

  // [name, policy, line] of each; a policy without a name has "".
  fill(entries) {
    this.list.replaceChildren(...entries.map(([name, policy, line]) => {
      const button = make("button");
      button.type = "button";
      button.append(...[["b", name], ["code", policy === name ? "" : policy], ["span", line]]
        .filter(([, text]) => text).map(([tag, text]) => make(tag, text)));
      button.addEventListener("click", () => {
        this.dialog.close();
        this.choose(policy);
      });
      const item = make("li");
      item.append(button);
      return item;
    }));
  }

  // Calls `choose` with the policy that is chosen.
  open(choose) {
    this.choose = choose;
    this.find.value = "";
    this.#narrow();
    this.dialog.showModal();
    if (matchMedia("(min-width: 34rem)").matches) this.find.focus(); // a phone's keyboard would cover the list
  }

  #narrow() {
    const words = this.find.value.toLowerCase().split(/\s+/);
    for (const item of this.list.children) {
      const text = item.textContent.toLowerCase();
      item.hidden = !words.every((word) => text.includes(word));
    }
  }
}
