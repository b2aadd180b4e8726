"""Settings of Sphinx, the generator of the site: ``scripts/docs`` builds it."""

import re

from docutils import nodes
from docutils.transforms import Transform
from sphinx.application import Sphinx

project = "preheat"
extensions = ["myst_parser"]
myst_heading_anchors = 4  # links name a section as GitHub does
myst_enable_extensions = ["deflist", "html_image"]

html_theme = "furo"
html_title = "preheat"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#a63a0a", "color-brand-content": "#a63a0a"},
    "dark_css_variables": {"color-brand-primary": "#ff9f6b", "color-brand-content": "#ffab7d"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

_ANCHOR = re.compile(r'<a id="([^"]*)">')
_ROOT_PAGE = re.compile(r"\]\(\.\./(CHANGELOG|CONTRIBUTING|SECURITY)\.md")


class Anchors(Transform):
    """Turn each ``<a id="name"></a>`` into a target, so that Sphinx checks the links to it."""

    default_priority = 100

    def apply(self) -> None:
        """Replace the opening tags; a closing tag has no output of its own."""
        env = self.document.settings.env
        slugs = env.metadata[env.docname].setdefault("myst_slugs", {})
        for raw in list(self.document.findall(nodes.raw)):
            if raw.astext() == "</a>":
                raw.parent.remove(raw)
            elif match := _ANCHOR.fullmatch(raw.astext()):
                target = nodes.target("", "", ids=[match[1]], names=[match[1]])
                self.document.note_explicit_target(target, target)
                slugs[match[1]] = (raw.line, match[1], match[1])
                raw.replace_self(target)


def lead_to_the_site(_app: Sphinx, _page: str, text: list[str]) -> None:
    """Let links to Markdown files of the root lead to the pages that include them."""
    text[0] = _ROOT_PAGE.sub(lambda match: f"]({match[1].lower()}.md", text[0])


def setup(app: Sphinx) -> None:
    """Register the transform and the mending of links."""
    app.add_transform(Anchors)
    app.connect("source-read", lead_to_the_site)
