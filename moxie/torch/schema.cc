// Every op of torch.ops.moxie, and nothing else. R rows (tokens) in G groups, C columns; weights
// are [G, N, K].
//
// offs    int32 [G], the exclusive end of each group of rows; tokens only
// block   rows x cols of x that share a scale: 1x32 32x1 32x32 1x128 128x1 128x32 128x128
// rule    rceil floor ceil even
// qdata   float8_e4m3fn; scale float8_e8m0fnu unless said otherwise
// _t      stored transposed: [C, R'], R' being R and what pads each group to the block; or [G, K,
// N]
//
// The overload `out` writes into tensors of exactly the shape, dtype and device that the op would
// return; a scale may be uint8 there, because inductor does not let an op write e8m0. It returns
// nothing: torch only functionalizes a custom op whose results alias none of its arguments.
#include <torch/library.h>

TORCH_LIBRARY(moxie, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const auto def = [&](const char* schema) { m.def(schema, tags); };

  // x [R, C] or [G, N, K], bf16 or f32 -> qdata as x, scale [R, C / 32] or [G, N, K / 32]
  def("quantize_rowwise(Tensor x, *, Tensor? offs=None, str block='1x32', str rule='rceil', "
      "str scale_layout='plain') -> (Tensor qdata, Tensor scale)");
  def("quantize_rowwise.out(Tensor x, *, Tensor? offs=None, str block='1x32', str rule='rceil', "
      "str scale_layout='plain', Tensor(a!) qdata, Tensor(b!) scale) -> ()");
  // -> qdata_t [C, R'] or [G, K, N], scale_t [C, R' / 32] or [G, K, N / 32]
  def("quantize_colwise(Tensor x, *, Tensor? offs=None, str block='32x1', str rule='rceil', "
      "str scale_layout='plain') -> (Tensor qdata_t, Tensor scale_t)");
  def("quantize_colwise.out(Tensor x, *, Tensor? offs=None, str block='32x1', str rule='rceil', "
      "str scale_layout='plain', Tensor(a!) qdata_t, Tensor(b!) scale_t) -> ()");
  // Both forms from one read of x.
  def("quantize_both(Tensor x, *, Tensor? offs=None, str rowwise_block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain') -> "
      "(Tensor qdata, Tensor scale, Tensor qdata_t, Tensor scale_t)");
  def("quantize_both.out(Tensor x, *, Tensor? offs=None, str rowwise_block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', Tensor(a!) qdata, "
      "Tensor(b!) scale, Tensor(c!) qdata_t, Tensor(d!) scale_t) -> ()");

  // The inverses; scales are plain. x comes back [R, C] or [G, N, K], bf16 (dtype=None) or f32.
  def("dequantize_rowwise(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "ScalarType? dtype=None) -> Tensor x");
  def("dequantize_rowwise.out(Tensor qdata, Tensor scale, *, Tensor? offs=None, "
      "str block='1x32', Tensor(a!) x) -> ()");
  // num_rows is R, or N of weights: the padding of qdata_t hides it.
  def("dequantize_colwise(Tensor qdata_t, Tensor scale_t, SymInt num_rows, *, Tensor? offs=None, "
      "str block='32x1', ScalarType? dtype=None) -> Tensor x");
  def("dequantize_colwise.out(Tensor qdata_t, Tensor scale_t, SymInt num_rows, *, "
      "Tensor? offs=None, str block='32x1', Tensor(a!) x) -> ()");

  // The rowwise form (plain scales) -> the colwise form, straight from FP8.
  def("requantize(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain') -> "
      "(Tensor qdata_t, Tensor scale_t)");
  def("requantize.out(Tensor qdata, Tensor scale, *, Tensor? offs=None, str block='1x32', "
      "str colwise_block='32x1', str rule='rceil', str scale_layout='plain', "
      "Tensor(a!) qdata_t, Tensor(b!) scale_t) -> ()");

  // FP8 rowwise, scales f32: qdata as x and scale [R] or [G, N]
  def("quantize_per_row(Tensor x, *, Tensor? offs=None) -> (Tensor qdata, Tensor scale)");
  def("quantize_per_row.out(Tensor x, *, Tensor? offs=None, Tensor(a!) qdata, Tensor(b!) scale) -> "
      "()");
  // qdata_t [C, R'], groups padded to 16, and scale_t [G, C]; or [G, K, N] and [G, K]
  def("quantize_per_col(Tensor x, *, Tensor? offs=None) -> (Tensor qdata_t, Tensor scale_t)");
  def("quantize_per_col.out(Tensor x, *, Tensor? offs=None, Tensor(a!) qdata_t, Tensor(b!) "
      "scale_t) -> ()");

  // Scales of 1 x 32 between layouts. form rowwise: offs counts rows. form colwise: offs counts
  // scale columns.
  // scale [rows, cols] -> [rows', cols'] in tiles of 128 x 4; [G, rows, cols] -> [G, rows' cols']
  def("swizzle_scale(Tensor scale, *, Tensor? offs=None, str form='rowwise') -> Tensor swizzled");
  def("unswizzle_scale(Tensor swizzled, SymInt rows, SymInt cols, *, Tensor? offs=None, "
      "str form='rowwise') -> Tensor scale");
  // Scales of larger blocks <-> one per 1 x 32, [outer, k / 32] or [G, outer, k / 32]
  def("replicate_scale(Tensor scale, SymInt outer, SymInt k, *, str block, str form='rowwise') -> "
      "Tensor replicated");
  def("compact_scale(Tensor scale, *, str block, str form='rowwise') -> Tensor compact");

  // x [R, C], any dtype -> padded [R + about G * alignment, C], and each group's rows in it:
  // starts, ends int32 [G]
  def("pad_groups(Tensor x, Tensor offs, int alignment=32) -> "
      "(Tensor padded, Tensor starts, Tensor ends)");
  def("pad_groups.out(Tensor x, Tensor offs, int alignment=32, *, Tensor(a!) padded, "
      "Tensor(b!) starts, Tensor(c!) ends) -> ()");
  def("unpad_groups(Tensor padded, Tensor offs, Tensor starts, SymInt num_rows) -> Tensor x");
  def("unpad_groups.out(Tensor padded, Tensor offs, Tensor starts, SymInt num_rows, *, "
      "Tensor(a!) x) -> ()");
  def("padded_offs(Tensor offs, int alignment=32) -> Tensor padded");

  // What core/cost says of a call of `op` on x of this shape: [flops, bytes read, bytes written]
  def("_cost(str op, int[] shape, *, ScalarType? dtype=None, int? num_groups=None, "
      "str rowwise_block='1x32', str colwise_block='32x1', str scale_layout='plain', "
      "int alignment=32) -> float[]");
  def("_has_cuda() -> bool");
}
