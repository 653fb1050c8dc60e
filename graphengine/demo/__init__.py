"""The demo's data: the prompts that `graphengine demo` answers."""

from pathlib import Path

PROMPTS_FILE = Path(__file__).with_name("prompts.json")
