"""A few SVG primitives for the pictures of docs/: plain text out, the same bytes on every machine.

Colours are CSS variables with a light fallback: the site, which puts the pictures into its pages, sets them for light
and dark; a picture that is shown by itself is light, on a card of its own.
"""

from __future__ import annotations

from html import escape

COLOURS = {
    "paper": "#ffffff", "ink": "#1f2933", "soft": "#61707f", "line": "#9aa5b1", "grid": "#dfe4ea", "blank": "#f1f4f7",
    "blue": "#a9cdf0", "orange": "#f7c99b", "green": "#a8dcc2", "purple": "#d3bdf0", "red": "#f3b0b0",
    "blue-ink": "#1565c0", "orange-ink": "#c25700", "green-ink": "#14804f", "purple-ink": "#6d3fc0",
    "red-ink": "#c02b3c",
}  # fmt: skip
FONT = "Inter, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def colour(name: str) -> str:
    return name if name == "none" else f"var(--d-{name}, {COLOURS[name]})"


def number(x: float) -> str:
    return f"{round(x, 1):g}"


class Picture:
    """A drawing of `width` × `height` units; text is 14 units high where nothing else is said."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str = "none", stroke: str = "line", *,
        rx: float = 0, dash: str = "", width: float = 1,
    ) -> None:  # fmt: skip
        extra = f' rx="{number(rx)}"' if rx else ""
        extra += f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"{extra} '
            f'style="fill:{colour(fill)};stroke:{colour(stroke)};stroke-width:{number(width)}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: float = 14, fill: str = "ink", anchor: str = "start",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        """`y` is the middle of the letters."""
        style = f"fill:{colour(fill)};font-family:{MONO if mono else FONT};font-size:{number(size)}px"
        style += ";font-weight:600" if bold else ""
        self._parts.append(
            f'<text x="{number(x)}" y="{number(y + size * 0.35)}" text-anchor="{anchor}" style="{style}">'
            f"{escape(words, quote=False)}</text>"
        )

    def cell(
        self, x: float, y: float, w: float, h: float, words: str, fill: str = "blank", *, size: float = 13,
        mono: bool = False, stroke: str = "line", ink: str = "ink",
    ) -> None:  # fmt: skip
        """A box with words in its middle."""
        self.rect(x, y, w, h, fill, stroke)
        if words:
            self.text(x + w / 2, y + h / 2, words, size=size, anchor="middle", mono=mono, fill=ink)

    def line(self, points: list[tuple[float, float]], stroke: str = "line", width: float = 1, dash: str = "") -> None:
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        extra = f' stroke-dasharray="{dash}"' if dash else ""
        style = f"fill:none;stroke:{colour(stroke)};stroke-width:{number(width)}"
        self._parts.append(f'<polyline points="{path}"{extra} style="{style}"/>')

    def arrow(self, points: list[tuple[float, float]], stroke: str = "soft", width: float = 1.5) -> None:
        """A line with a head at its end; its last piece must be horizontal or vertical."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = ((x1 > x0) - (x1 < x0), 0) if y0 == y1 else (0, (y1 > y0) - (y1 < y0))
        self.line([*points[:-1], (x1 - 6 * dx, y1 - 6 * dy)], stroke, width)
        corners = [(x1, y1), (x1 - 8 * dx + 4 * dy, y1 - 8 * dy + 4 * dx), (x1 - 8 * dx - 4 * dy, y1 - 8 * dy - 4 * dx)]
        path = " ".join(f"{number(x)},{number(y)}" for x, y in corners)
        self._parts.append(f'<polygon points="{path}" style="fill:{colour(stroke)}"/>')

    def dot(self, x: float, y: float, fill: str, r: float = 4.5) -> None:
        style = f"fill:{colour(fill)};fill-opacity:.85"
        self._parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(r)}" style="{style}"/>')

    def cross(self, x: float, y: float, stroke: str = "soft", r: float = 3.5) -> None:
        self.line([(x - r, y - r), (x + r, y + r)], stroke, 1.5)
        self.line([(x - r, y + r), (x + r, y - r)], stroke, 1.5)

    def svg(self) -> str:
        w, h = number(self.width), number(self.height)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {w} {h}" width="{w}" role="img">\n'
            f"<title>{escape(self.title, quote=False)}</title>\n"
            f'<rect width="{w}" height="{h}" rx="8" style="fill:{colour("paper")}"/>\n'
        )
        return head + "\n".join(self._parts) + "\n</svg>\n"
