// Search runs in a worker, and browsers start none for pages that are opened from the disk. A hidden frame takes its
// place there: it has a script context of its own, and messages pass as to and from a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script src="${new URL(url, document.baseURI)}"></script>`
      this.frame.addEventListener("load", () => {
        this.inside = this.frame.contentWindow
        this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        for (const data of this.waiting) this.postMessage(data)
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
