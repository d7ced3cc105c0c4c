"""Checks on an export that run before any of its graph does: a SavedModel is a program, and assets name files."""

from pathlib import Path

from serving.saved_model.file_checks import check_documents, check_files
from serving.saved_model.graph_checks import check_graph
from serving.saved_model.manifest import check_manifest
from serving.saved_model.warmup_file import read_logs
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
_STRING_OPS = "AsString DecodeRaw ParseExampleV2 StaticRegexFullMatch StringFormat StringJoin StringLength Substr"
_IMAGE_OPS = "DecodeJpeg DecodePng ExtractJpegShape ResizeArea"

# Kernels of TensorFlow core that compute and do nothing else; the file ops are those a SavedModel needs to restore.
ALLOWED_OPS = frozenset(
    " ".join([_STATE_OPS, _CONTROL_OPS, _SHAPE_OPS, _MATHEMATICS_OPS, _NETWORK_OPS, _STRING_OPS, _IMAGE_OPS]).split()
)


def check_export(export_dir: Path) -> None:
    """Runs every check on an export. Nothing of the export is executed.

    The checks catch damage and well-known abuse; they are no sandbox, so serve only exports from someone you trust.

    Raises:
      ServingError: naming the first file, asset or op that is refused.
    """
    try:
        check_files(export_dir)
        check_manifest(export_dir)
        check_graph(export_dir, ALLOWED_OPS)
        check_documents(export_dir)
        # Only for what it refuses.
        read_logs(export_dir)
    # Files that go away or may not be read, and JSON that is nested without end.
    except (OSError, RecursionError) as error:
        raise ServingError(f"{export_dir} cannot be read: {error}.") from error
