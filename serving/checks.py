"""Checks on an export that run before any of its graph does: a SavedModel is a program, and assets name files."""

from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import saved_model_pb2

from serving import layout
from serving.manifest import check_manifest
from tff_pdp.errors import ServingError

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
_STRING_OPS = "AsString StaticRegexFullMatch StringFormat StringJoin"

# Kernels of TensorFlow core that compute and do nothing else; the file ops are those a SavedModel needs to restore.
ALLOWED_OPS = frozenset(
    " ".join([_STATE_OPS, _CONTROL_OPS, _SHAPE_OPS, _MATHEMATICS_OPS, _NETWORK_OPS, _STRING_OPS]).split()
)


def check_export(export_dir: Path) -> None:
    """Runs every check on an export. Nothing of the export is executed.

    The checks catch damage and well-known abuse; they are no sandbox, so serve only exports from someone you trust.

    Raises:
      ServingError: naming the first file, asset or op that is refused.
    """
    check_no_links(export_dir)
    check_manifest(export_dir)
    check_graph(export_dir)


def check_no_links(export_dir: Path) -> None:
    """Refuses links and special files: an export holds only its own bytes."""
    for path in (export_dir, *export_dir.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ServingError(f"{path} is a link or a special file; an export may hold plain files only.")


def check_graph(export_dir: Path) -> None:
    """Refuses a graph with assets outside `assets/` or with an op that is not on the allow-list."""
    path = export_dir / layout.SAVED_MODEL_FILE
    try:
        saved_model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ServingError(f"{path} is not a readable SavedModel: {error}.") from error
    for meta_graph in saved_model.meta_graphs:
        for asset in meta_graph.asset_file_def:
            _check_asset(export_dir, asset.filename)
        refused = sorted({node.op for node in _nodes(meta_graph.graph_def)} - ALLOWED_OPS)
        if refused:
            raise ServingError(
                f"{path} uses ops that are not served: {', '.join(refused)}. Export models made of TensorFlow's own "
                "mathematical ops only; Python functions, file and network access and custom ops are refused."
            )


def _check_asset(export_dir: Path, filename: str) -> None:
    # Loaders join this name to the assets directory unchecked: "../../secret" would be read as a vocabulary.
    if filename in ("", ".", "..") or "/" in filename or "\\" in filename:
        raise ServingError(
            f"{export_dir} names the asset {filename!r}, which is outside its assets directory; refused."
        )
    if not (export_dir / layout.ASSETS_DIRECTORY / filename).is_file():
        raise ServingError(f"{export_dir} lacks the asset {filename!r}; copy the export again.")


def _nodes(graph) -> Iterator:
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def
