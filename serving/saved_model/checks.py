"""Checks an export before any part of its graph runs: a SavedModel is a program that could read or write any file."""

import json
from pathlib import Path

from serving.saved_model import layout
from serving.saved_model.graph_checks import check_graph
from serving.saved_model.layout import check_manifest
from serving.saved_model.warmup import read_logs
from tff_pdp.errors import ServingError

# A loader that finds a graph under another name, or settings of a server, would use that graph or those settings.
_TOP_LEVEL = frozenset({layout.SAVED_MODEL_FILE, "fingerprint.pb", "variables", "assets", "assets.extra"})
_SERVER_SETTINGS = f"{layout.EXTRA_DIRECTORY}/saved_model_config.pbtxt"


def check_files(export_dir: Path) -> None:
    """Raises ServingError for links, special files, and files that loaders would read in place of checked files."""
    if not export_dir.is_dir():
        raise ServingError(f"{export_dir} is not a directory.")
    for path in (export_dir, *export_dir.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ServingError(f"{path} is a link or a special file; an export may hold plain files only.")
        if (path.parent == export_dir and path.name not in _TOP_LEVEL) or path == export_dir / _SERVER_SETTINGS:
            raise ServingError(f"{path} is no part of an export; remove it.")


def check_documents(export_dir: Path) -> None:
    """Raises ServingError if a JSON document of the export, such as the model card, is not valid JSON."""
    for path in sorted((export_dir / layout.EXTRA_DIRECTORY).glob("*.json")):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ServingError(f"{path} is not JSON: {error}.") from error


def check_complete(export_dir: Path) -> None:
    """Raises ServingError if an export lacks a file that servers do not need, but the exporter always writes."""
    for name in (layout.MODEL_CARD_FILE, layout.PRIVACY_REPORT_FILE, layout.WARMUP_FILE):
        if not (export_dir / name).is_file():
            raise ServingError(f"{export_dir} has no {name}: it is not a complete export; export the model again.")


_STATE_OPS = """
    AssignVariableOp DisableCopyOnRead MergeV2Checkpoints ReadVariableOp ResourceGather ResourceGatherNd RestoreV2
    SaveV2 ShardedFilename VarHandleOp VarIsInitializedOp
    HashTableV2 InitializeTableFromTextFileV2 LookupTableFindV2 LookupTableSizeV2
"""
_CONTROL_OPS = """
    Assert Case Const Empty If Identity IdentityN LoopCond NoOp PartitionedCall Placeholder PlaceholderWithDefault
    StatefulPartitionedCall StatelessCase StatelessIf StatelessWhile StopGradient While
    TensorListConcatV2 TensorListElementShape TensorListFromTensor TensorListGather TensorListGetItem TensorListLength
    TensorListReserve TensorListSetItem TensorListStack
"""
_SHAPE_OPS = """
    BatchToSpaceND BroadcastArgs BroadcastTo Concat ConcatV2 DepthToSpace EnsureShape ExpandDims Fill Gather GatherNd
    GatherV2 InvertPermutation MirrorPad OneHot OnesLike Pack Pad PadV2 Range Rank Reshape Reverse ReverseV2 ScatterNd
    Select SelectV2 Shape ShapeN Size Slice SpaceToBatchND SpaceToDepth Split SplitV Squeeze StridedSlice Tile
    Transpose Unpack Where ZerosLike
"""
_MATHEMATICS_OPS = """
    Abs Add AddN AddV2 All Any ArgMax ArgMin BatchMatMul BatchMatMulV2 BatchMatMulV3 Cast Ceil CheckNumerics
    CheckNumericsV2 ClipByValue Cos Cumsum Div DivNoNan Einsum Equal Erf Exp Expm1 Floor FloorDiv FloorMod Greater
    GreaterEqual IsFinite IsInf IsNan L2Loss LeakyRelu Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr MatMul
    Max Maximum Mean Min Minimum Mod Mul MulNoNan Neg NotEqual Pow Prod RealDiv Reciprocal Round Rsqrt Sigmoid Sign
    Sin Softplus Sqrt Square SquaredDifference Sub Sum Tanh TopKV2 UnsortedSegmentSum Xdivy Xlogy
"""
_NETWORK_OPS = """
    AvgPool BiasAdd BiasAddV1 Conv2D DepthwiseConv2dNative Elu FusedBatchNormV3 LogSoftmax MaxPool Relu Relu6
    Selu Softmax Softsign
"""
_STRING_OPS = "AsString DecodeRaw ParseExampleV2 StaticRegexFullMatch StringFormat StringJoin StringLength Substr"
_IMAGE_OPS = "DecodeJpeg DecodePng ExtractJpegShape ResizeArea"

# Kernels of TensorFlow core that compute and do nothing else; the file ops are those a SavedModel needs to restore.
ALLOWED_OPS = frozenset(
    " ".join([_STATE_OPS, _CONTROL_OPS, _SHAPE_OPS, _MATHEMATICS_OPS, _NETWORK_OPS, _STRING_OPS, _IMAGE_OPS]).split()
)


def check_export(export_dir: Path) -> None:
    """Runs every check on an export, without running the export's graph.

    The checks find damage and well-known abuse. They are not a sandbox: serve only exports from someone you trust.

    Raises:
      ServingError: a check fails; the message names the first file, asset or op that is refused.
    """
    try:
        check_files(export_dir)
        check_manifest(export_dir)
        check_graph(export_dir, ALLOWED_OPS)
        check_documents(export_dir)
        # Called only for its errors.
        read_logs(export_dir)
    # Files that vanish or may not be read, and JSON that is nested too deeply.
    except (OSError, RecursionError) as error:
        raise ServingError(f"{export_dir} cannot be read: {error}.") from error
