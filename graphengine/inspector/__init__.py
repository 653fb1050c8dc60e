"""The speculation inspector: where each token of an answer came from, recorded and as one page."""

from graphengine.inspector.page import About, write_page
from graphengine.inspector.recorder import Recorder

__all__ = ["About", "Recorder", "write_page"]
