"""Operations on images, as in AutoAugment and its successors: geometry, colour, sharpness, tables of levels.

Each image of a batch has its own operation and its own amount. The arithmetic is Pillow's, except that shears,
rotations and translations compute coordinates in float32. Pixels from outside an image are grey.

Legend: B images in a batch, H height, W width. Images are uint8 (B, H, W, 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engram.kernels.availability import is_available_for

GREY = 128  # level of pixels from outside the image
LUMA = (19595, 38470, 7471)  # weights of red, green and blue in a grey level, in units of 1 / 2**16


def operate(images: Tensor, codes: Tensor, amounts: Tensor) -> Tensor:
    """Apply to each image the operation with its code (position in OPERATIONS) and its amount: uint8 (B, H, W, 3).

    codes, amounts: (B,).
    """
    if is_available_for(images):
        from engram.kernels.image_operations import operate_on_gpu

        return operate_on_gpu(images, codes, amounts)
    out = images.clone()
    if images.is_cuda:  # no branch on a value: a step must be the same sequence of kernels every time
        for code, operation in enumerate(OPERATIONS.values()):
            is_chosen = (codes == code)[:, None, None, None]
            out = torch.where(is_chosen, operation(images, amounts), out)
        return out
    for code, operation in enumerate(OPERATIONS.values()):
        chosen = torch.nonzero(codes == code).squeeze(1)
        if len(chosen):
            out[chosen] = operation(images[chosen], amounts[chosen])
    return out


def identity(images: Tensor, amounts: Tensor) -> Tensor:
    """The images, unchanged."""
    return images


def shear_x(images: Tensor, amounts: Tensor) -> Tensor:
    """Move each row by `amount` times its distance from the top."""
    return _moved(images, lambda x, y: (x + amounts[:, None, None] * y, y))


def shear_y(images: Tensor, amounts: Tensor) -> Tensor:
    """Move each column by `amount` times its distance from the left."""
    return _moved(images, lambda x, y: (x, y + amounts[:, None, None] * x))


def translate_x(images: Tensor, amounts: Tensor) -> Tensor:
    """Move the image to the right by `amount` pixels."""
    return _moved(images, lambda x, y: (x - amounts[:, None, None], y))


def translate_y(images: Tensor, amounts: Tensor) -> Tensor:
    """Move the image down by `amount` pixels."""
    return _moved(images, lambda x, y: (x, y - amounts[:, None, None]))


def rotate(images: Tensor, amounts: Tensor) -> Tensor:
    """Rotate the image by `amount` degrees about its centre, counter-clockwise."""
    angle = (amounts * (math.pi / 180))[:, None, None]
    cosine, sine = angle.cos(), angle.sin()
    half_y, half_x = images.shape[1] / 2, images.shape[2] / 2

    def turned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x - half_x, y - half_y
        return cosine * x - sine * y + half_x, sine * x + cosine * y + half_y

    return _moved(images, turned)


def _moved(images: Tensor, source: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """The images whose pixel at x (W,), y (H, 1) comes from the pixel at `source(x, y)`."""
    batch, height, width, _ = images.shape
    device = images.device
    ys = torch.arange(height, device=device)[:, None] + 0.5
    both = source(torch.arange(width, device=device) + 0.5, ys)
    column, row = torch.broadcast_tensors(*(place.floor().long() for place in both))
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    places = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).reshape(batch, -1, 1)
    picked = images.flatten(1, 2).gather(1, places.expand(-1, -1, 3)).view_as(images)
    return torch.where(inside[..., None], picked, GREY)


def brightness(images: Tensor, amounts: Tensor) -> Tensor:
    """Multiply the levels by 1 + amount."""
    return _blend(torch.zeros_like(images), images, amounts)


def colour(images: Tensor, amounts: Tensor) -> Tensor:
    """Multiply the distance from the grey image by 1 + amount."""
    return _blend(_grey(images)[..., None].expand_as(images), images, amounts)


def contrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Multiply the distance from the mean grey level by 1 + amount."""
    pixels = images.shape[1] * images.shape[2]
    mean = (2 * _grey(images).long().sum(dim=(1, 2)) + pixels) // (2 * pixels)
    return _blend(mean[:, None, None, None].expand_as(images), images, amounts)


def sharpness(images: Tensor, amounts: Tensor) -> Tensor:
    """Multiply the distance from a smoothed image by 1 + amount; pixels at the edge stay as they are."""
    levels = images.int()
    smooth = levels.clone()
    if min(images.shape[1:3]) > 2:
        rows = levels[:, :-2] + levels[:, 1:-1] + levels[:, 2:]
        around = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:]
        inner = slice(1, -1)
        smooth[:, inner, inner] = (2 * (around + 4 * levels[:, inner, inner]) + 13) // 26  # weights 1 and, inside, 5
    return _blend(smooth, images, amounts)


def _blend(start: Tensor, images: Tensor, amounts: Tensor) -> Tensor:
    """start + (1 + amount) (images - start), cut off at 0 and 255, without its fraction."""
    start = start.float()
    mixed = start + (1 + amounts)[:, None, None, None] * (images.float() - start)
    return mixed.clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """The grey levels (B, H, W), int32."""
    red, green, blue = images.int().unbind(dim=3)
    return (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2] + 2**15) >> 16


def posterize(images: Tensor, amounts: Tensor) -> Tensor:
    """Keep the highest `amount` bits of each level."""
    dropped = (1 << (8 - amounts.int())) - 1
    return (images.int() & ~dropped[:, None, None, None]).to(torch.uint8)


def solarize(images: Tensor, amounts: Tensor) -> Tensor:
    """Invert the levels from `amount` on."""
    return torch.where(images.float() < amounts[:, None, None, None], images, 255 - images)


def autocontrast(images: Tensor, amounts: Tensor) -> Tensor:
    """Stretch the levels of each channel to 0 to 255."""
    lowest, highest = images.amin(dim=(1, 2), keepdim=True).float(), images.amax(dim=(1, 2), keepdim=True).float()
    scale = 255 / (highest - lowest).clamp(min=1)
    stretched = (images.float() * scale + -lowest * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(highest > lowest, stretched, images)


def equalize(images: Tensor, amounts: Tensor) -> Tensor:
    """Change the levels of each channel so that they are equally frequent."""
    batch = len(images)
    levels = images.flatten(1, 2).mT.long()  # (B, 3, pixels)
    # Sums of ones are exact, so their order does not matter.
    counts = torch.zeros(batch, 3, 256, device=images.device).scatter_add_(
        2, levels, torch.ones_like(levels, dtype=torch.float32)
    )
    counts = counts.long()
    last = counts.gather(2, levels.amax(dim=2, keepdim=True))  # of the highest level
    step = (counts.sum(dim=2, keepdim=True) - last) // 255
    before = counts.cumsum(dim=2) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.gather(2, levels).mT.view_as(images).to(torch.uint8)


def invert(images: Tensor, amounts: Tensor) -> Tensor:
    """255 minus each level."""
    return 255 - images


# By name; an operation's code is its position, which the GPU kernel knows too.
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "identity": identity,
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "rotate": rotate,
    "brightness": brightness,
    "colour": colour,
    "contrast": contrast,
    "sharpness": sharpness,
    "posterize": posterize,
    "solarize": solarize,
    "autocontrast": autocontrast,
    "equalize": equalize,
    "invert": invert,
}
CODES = {name: code for code, name in enumerate(OPERATIONS)}


def cut_out(images: Tensor, places: Tensor, side: int) -> Tensor:
    """Make a square box of each image grey. places: (B, 2), its centre as a share of height and width."""

    def covered(centre: Tensor, extent: int) -> Tensor:
        """The pixels along a side that are inside the box (B, extent)."""
        first = (centre * extent).floor() - side // 2
        pixels = torch.arange(extent, device=images.device)
        return (pixels >= first[:, None]) & (pixels < first[:, None] + side)

    rows, columns = covered(places[:, 0], images.shape[1]), covered(places[:, 1], images.shape[2])
    return torch.where((rows[:, :, None] & columns[:, None, :])[..., None], GREY, images)
