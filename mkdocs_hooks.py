"""What the site changes of Markdown: `_` is a subscript (‖X‖_1, W_Q), never emphasis."""

from typing import Any

from markdown import Markdown
from markdown.extensions import Extension


class Subscripts(Extension):
    """Without emphasis by underscores; `*` remains."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Called by Markdown (3.11, which is pinned)."""
        md.delimiters.remove("_")


def on_config(config: Any) -> Any:
    """Called by MkDocs before it reads a page."""
    config.markdown_extensions.append(Subscripts())
    return config
