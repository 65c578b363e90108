// Search runs in a worker, and browsers start none for pages that are opened from the disk. A hidden frame takes its
// place there: it has a script context of its own, and posts messages as a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = `<script>postMessage = message => parent.postMessage(message, "*")</script>
        <script src="${new URL(url, document.baseURI)}"></script>`
      this.frame.addEventListener("load", () => {
        this.loaded = true
        for (const message of this.waiting.splice(0)) this.postMessage(message)
      })
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return
        const received = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(received)
        if (this.onmessage) this.onmessage(received)
      })
      document.body.append(this.frame)
    }

    postMessage(message) {
      if (this.loaded) this.frame.contentWindow.postMessage(message, "*")
      else this.waiting.push(message)
    }

    terminate() {
      this.frame.remove()
    }
  }
}
