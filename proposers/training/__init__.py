"""Training drafts for a target by distillation. Imports nothing of graphengine."""

from proposers.training.corpus import Chats, CorpusConfig, Piece, read_corpus
from proposers.training.curves import can_draw
from proposers.training.draft_config import KINDS, DraftConfig, Kind
from proposers.training.draft_vocab import check_draft_vocab
from proposers.training.heads import Eagle3Flags
from proposers.training.hidden_cache import Progress
from proposers.training.job import CSV_FILE, PNG_FILE, DraftJob
from proposers.training.target import LayerSizes, Target, Teacher, TeacherRows
from proposers.training.trainer import Point, Precision, TrainConfig

__all__ = [
    "CSV_FILE",
    "KINDS",
    "PNG_FILE",
    "Chats",
    "CorpusConfig",
    "DraftConfig",
    "DraftJob",
    "Eagle3Flags",
    "Kind",
    "LayerSizes",
    "Piece",
    "Point",
    "Precision",
    "Progress",
    "Target",
    "Teacher",
    "TeacherRows",
    "TrainConfig",
    "can_draw",
    "check_draft_vocab",
    "read_corpus",
]
