// Images from a person: dropped (with folders), chosen, pasted, taken with the camera.

import { add, button, h, icon, notify, openDialog } from "./dom.js";

const NAMES = /\.(jpe?g|jfif|png|webp|gif|bmp|tiff?|avif|heic|heif|ppm|pgm|jp2)$/i;
const MOST = 20_000; // files of one drop

/** One image: the file, and the folder it lay in (or ""). */
function found(file, folder = "") {
  return { file, folder };
}

function wanted(file) {
  return !file.name.startsWith(".") && (file.type.startsWith("image/") || NAMES.test(file.name));
}

/** The image files of a drop or a paste, with those in folders at any depth. */
export async function fromTransfer(transfer) {
  const entries = [...(transfer.items ?? [])]
    .filter((item) => item.kind === "file")
    .map((item) => ({ entry: item.webkitGetAsEntry?.() ?? null, file: item.getAsFile() }));
  if (!entries.length) return fromList(transfer.files ?? []);
  const images = [];
  for (const { entry, file } of entries) {
    if (entry?.isDirectory) await walk(entry, images);
    else if (file) images.push(found(file));
  }
  return images;
}

async function walk(folder, images) {
  const reader = folder.createReader();
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) return;
    for (const entry of some.sort((a, b) => a.name.localeCompare(b.name))) {
      if (images.length >= MOST) return;
      if (entry.isDirectory) await walk(entry, images);
      else {
        const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
        if (wanted(file)) images.push(found(file, folder.name));
      }
    }
  }
}

/** The images of a file list, such as that of an input; of a folder only its image files. */
function fromList(files) {
  return [...files]
    .filter((file) => !file.webkitRelativePath || wanted(file))
    .slice(0, MOST)
    .map((file) => found(file, file.webkitRelativePath ? file.webkitRelativePath.split("/").at(-2) ?? "" : ""));
}

function chooser(take, props) {
  const input = h("input", {
    type: "file", class: "hidden", tabindex: "-1", "aria-hidden": "true", ...props,
    onchange: () => {
      const images = fromList(input.files);
      input.value = "";
      if (images.length) take(images);
    },
  });
  return input;
}

/** Buttons to choose files, a folder, or the camera. `take` gets the images. */
export function sources(take, { name = "", folders = true, small = false, main = true } = {}) {
  const suffix = name ? ` for ${name}` : "";
  const kind = small ? "small" : "";
  const files = chooser(take, { accept: "image/*", multiple: true, "data-choose": "files" });
  const photo = chooser(take, { accept: "image/*", capture: "environment", "data-choose": "photo" });
  const parts = [
    button("Choose images", { icon: "images", kind: small ? "small" : main ? "main" : "", "aria-label": `Choose images${suffix}`, onclick: () => files.click() }),
    files,
  ];
  if (folders && "webkitdirectory" in HTMLInputElement.prototype) {
    const folder = chooser(take, { webkitdirectory: true, multiple: true, "data-choose": "folder" });
    parts.push(button("Choose a folder", { icon: "folder", kind, "data-source": "folder", onclick: () => folder.click() }), folder);
  }
  parts.push(button("Camera", {
    icon: "camera", kind, "aria-label": `Camera${suffix}`,
    onclick: () => (camera() ? takePhotos(take) : photo.click()),
  }), photo);
  return h("div", { class: "sources" }, parts);
}

/** A phone has its own camera app; elsewhere the page may ask for the camera. */
function camera() {
  return Boolean(navigator.mediaDevices?.getUserMedia) && !matchMedia("(pointer: coarse)").matches;
}

async function takePhotos(take) {
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" }, audio: false });
  } catch (error) {
    const why = error.name === "NotAllowedError" ? "The browser does not allow the camera on this page." : "There is no camera that the page can use.";
    notify(`${why} Choose image files instead.`, { error: true });
    return;
  }
  const taken = [];
  await openDialog("Take photos", (dialog, close) => {
    const video = h("video", { class: "camera", autoplay: true, playsinline: true, "aria-label": "What the camera sees" });
    video.muted = true;
    video.srcObject = stream;
    const strip = h("div", { class: "strip", "aria-live": "polite" });
    const shoot = async () => {
      if (!video.videoWidth) return;
      const canvas = h("canvas", { width: video.videoWidth, height: video.videoHeight });
      canvas.getContext("2d").drawImage(video, 0, 0);
      const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92));
      const file = new File([blob], `photo-${new Date().toISOString().replace(/[:.]/g, "-")}.jpg`, { type: "image/jpeg" });
      taken.push(found(file));
      strip.append(h("img", { src: URL.createObjectURL(blob), alt: `Photo ${taken.length}`, width: 64, height: 64 }));
      done.disabled = false;
    };
    const done = button("Use the photos", { icon: "check", kind: "main", disabled: true, onclick: () => close(true) });
    return [video, strip, h("div", { class: "actions" },
      button("Take a photo", { icon: "camera", onclick: shoot, autofocus: true }), done)];
  }, { wide: true }).then((used) => { if (!used) taken.length = 0; });
  for (const track of stream.getTracks()) track.stop();
  if (taken.length) take(taken);
}

/** Makes an element a place to drop images on. */
export function droppable(element, take) {
  let depth = 0;
  const over = (on) => element.classList.toggle("over", on);
  const files = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  element.addEventListener("dragenter", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    depth += 1;
    over(true);
  });
  element.addEventListener("dragover", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "copy";
  });
  element.addEventListener("dragleave", () => {
    depth = Math.max(0, depth - 1);
    if (!depth) over(false);
  });
  element.addEventListener("drop", async (event) => {
    if (!files(event)) return;
    event.preventDefault();
    event.stopPropagation();
    depth = 0;
    over(false);
    receive(await fromTransfer(event.dataTransfer), take);
  });
  return element;
}

/** Gives images to `take`, or says that there are none. */
export function receive(images, take) {
  if (images.length) take(images);
  else notify("No image files were found in what was dropped.", { error: true });
}

/** The large place to drop images on, with buttons for those who cannot drag. */
export function dropZone(title, text, take, options = {}) {
  const zone = h("div", { class: "zone", role: "group", "aria-label": title });
  add(zone, h("div", { class: "zone-icon" }, icon("images")), h("p", { class: "zone-title" }, title), h("p", { class: "hint" }, text), sources(take, options));
  return droppable(zone, take);
}
