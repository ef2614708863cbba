// SPDX-License-Identifier: Apache-2.0
#include "contract.h"

#include <cuda_runtime_api.h>

namespace treewy::plugin {
namespace {

constexpr const char* kSymbolNames[] = {"B", "N", "T", "L", "slots", "HK", "HV",
                                        "K", "V", "C", "W", "H",     "1"};

struct DimText {
    char text[16];
};

DimText dim_text(Dim dim) noexcept {
    DimText result;
    const char* name = kSymbolNames[static_cast<int>(dim.symbol)];
    if (dim.plus == 0) {
        std::snprintf(result.text, sizeof(result.text), "%s", name);
    } else {
        std::snprintf(result.text, sizeof(result.text), "%s%+d", name, dim.plus);
    }
    return result;
}

// " is [2, 5, 3], must be [B, N, HV] with B = 2, N = 5, HV = 4".
bool refuse_shape(const PluginSpec& spec, const char* role, const TensorSpec& tensor,
                  const Tensor& got, const Sizes& sizes, Message* message) noexcept {
    message->add("%s: %s %s is [", spec.name, role, tensor.name);
    for (int i = 0; i < got.rank && i < kMaxRank; ++i) {
        message->add("%s%lld", i == 0 ? "" : ", ", static_cast<long long>(got.dims[i]));
    }
    message->add("], must be [");
    for (int i = 0; i < tensor.rank(); ++i) {
        message->add("%s%s", i == 0 ? "" : ", ", dim_text(tensor.dims[i]).text);
    }
    message->add("]");
    const char* joint = " with ";
    for (int i = 0; i < tensor.rank(); ++i) {
        const Symbol symbol = tensor.dims[i].symbol;
        if (symbol == Symbol::kOne || sizes[symbol] < 0) continue;
        message->add("%s%s = %lld", joint, dim_text({symbol, 0}).text,
                     static_cast<long long>(sizes[symbol]));
        joint = ", ";
    }
    return false;
}

// Binds the symbols that are not known yet, and compares the others.
bool match_shape(const PluginSpec& spec, const char* role, const TensorSpec& tensor,
                 const Tensor& got, bool wild, Sizes* sizes, Message* message) noexcept {
    if (got.rank != tensor.rank()) return refuse_shape(spec, role, tensor, got, *sizes, message);
    for (int i = 0; i < got.rank; ++i) {
        if (wild && got.dims[i] < 0) continue;
        const Dim dim = tensor.dims[i];
        const int64_t value = got.dims[i] - dim.plus;
        int64_t& bound = (*sizes)[dim.symbol];
        if (got.dims[i] < 0 || value < 0 || (bound >= 0 && bound != value)) {
            return refuse_shape(spec, role, tensor, got, *sizes, message);
        }
        bound = value;
    }
    return true;
}

constexpr const char* kKindNames[] = {"activation", "gate",    "weight", "state",
                                      "stash",      "float32", "int32"};

struct TypeSet {
    Type types[3];
    const char* text;
};

constexpr TypeSet kKindTypes[] = {
    {{Type::kFloat32, Type::kFloat16, Type::kBFloat16}, "float32, float16 or bfloat16"},
    {{Type::kFloat32, Type::kFloat16, Type::kBFloat16}, "float32, float16 or bfloat16"},
    {{Type::kFloat32, Type::kFloat16, Type::kBFloat16}, "float32, float16 or bfloat16"},
    {{Type::kFloat32, Type::kBFloat16, Type::kBFloat16}, "float32 or bfloat16"},
    {{Type::kFloat32, Type::kBFloat16, Type::kBFloat16}, "float32 or bfloat16"},
    {{Type::kFloat32, Type::kFloat32, Type::kFloat32}, "float32"},
    {{Type::kInt32, Type::kInt32, Type::kInt32}, "int32"},
};

bool may_have(Kind kind, Type type) noexcept {
    for (const Type one : kKindTypes[static_cast<int>(kind)].types) {
        if (one == type) return true;
    }
    return false;
}

bool match_type(const PluginSpec& spec, const char* role, const TensorSpec& tensor, Type got,
                Type* bound, Message* message) noexcept {
    if (!may_have(tensor.kind, got)) {
        return message->add("%s: %s %s is %s, must be %s", spec.name, role, tensor.name,
                            type_name(got), kKindTypes[static_cast<int>(tensor.kind)].text);
    }
    if (*bound != Type::kOther && *bound != got) {
        return message->add("%s: %s %s is %s, must be %s like the others of its kind (%s)",
                            spec.name, role, tensor.name, type_name(got), type_name(*bound),
                            kKindNames[static_cast<int>(tensor.kind)]);
    }
    *bound = got;
    return true;
}

bool match_tensors(const PluginSpec& spec, const char* role, const TensorSpec* table,
                   const Present& present, const Tensor* tensors, bool wild, Call* call,
                   Message* message) noexcept {
    for (int i = 0; i < present.count; ++i) {
        const TensorSpec& tensor = table[present.place[i]];
        if (!match_type(spec, role, tensor, tensors[i].type,
                        &call->types[static_cast<int>(tensor.kind)], message) ||
            !match_shape(spec, role, tensor, tensors[i], wild, &call->sizes, message)) {
            return false;
        }
        if (!tensors[i].linear) {
            return message->add("%s: %s %s must be in linear format", spec.name, role, tensor.name);
        }
    }
    return true;
}

bool check_range(const PluginSpec& spec, const Sizes& sizes, Symbol symbol, int64_t low,
                 int64_t high, Message* message) noexcept {
    const int64_t size = sizes[symbol];
    if (size < 0 || (size >= low && size <= high)) return true;
    return message->add("%s: %s is %lld, must be from %lld to %lld", spec.name,
                        dim_text({symbol, 0}).text, static_cast<long long>(size),
                        static_cast<long long>(low), static_cast<long long>(high));
}

// Asks the launcher about an empty batch: what it refuses then, it refuses always. What is not
// known gets a value that no kernel refuses.
bool check_launch(const PluginSpec& spec, const Call& call, Message* message) noexcept {
    Call probe;
    probe.fields = call.fields;
    const auto size_or = [&](Symbol symbol, int64_t other) {
        probe.sizes[symbol] = call.sizes[symbol] >= 0 ? call.sizes[symbol] : other;
    };
    for (const Symbol symbol : {Symbol::kN, Symbol::kL, Symbol::kSlots, Symbol::kH, Symbol::kHK,
                                Symbol::kHV, Symbol::kC}) {
        size_or(symbol, 1);
    }
    size_or(Symbol::kK, 128);
    size_or(Symbol::kV, 128);
    size_or(Symbol::kW, 4);
    probe.sizes[Symbol::kB] = probe.sizes[Symbol::kT] = 0;
    for (int kind = 0; kind < static_cast<int>(Kind::kCount); ++kind) {
        const bool is_state = kind == static_cast<int>(Kind::kState);
        const Type other = is_state ? Type::kBFloat16 : Type::kFloat32;
        probe.types[kind] = call.types[kind] == Type::kOther ? other : call.types[kind];
    }
    if (spec.launch(probe) == TREEWY_OK) return true;
    return message->add("%s: %s", spec.name, treewy_last_error());
}

// The limits that treewy.h states for all kernels, and those that a launcher without data knows.
bool check_limits(const PluginSpec& spec, const Call& call, Message* message) noexcept {
    const Sizes& sizes = call.sizes;
    const int64_t any = INT32_MAX;
    if (!check_range(spec, sizes, Symbol::kN, 0, TREEWY_MAX_NODES, message) ||
        !check_range(spec, sizes, Symbol::kK, 1, TREEWY_MAX_HEAD_DIM, message) ||
        !check_range(spec, sizes, Symbol::kV, 1, TREEWY_MAX_HEAD_DIM, message) ||
        !check_range(spec, sizes, Symbol::kW, 2, TREEWY_MAX_CONV_WIDTH, message)) {
        return false;
    }
    for (const Symbol symbol : {Symbol::kHK, Symbol::kHV, Symbol::kC, Symbol::kH}) {
        if (!check_range(spec, sizes, symbol, 1, any, message)) return false;
    }
    for (const Symbol symbol : {Symbol::kB, Symbol::kL, Symbol::kSlots}) {
        if (!check_range(spec, sizes, symbol, 0, any, message)) return false;
    }
    const int64_t key_heads = sizes[Symbol::kHK], value_heads = sizes[Symbol::kHV];
    if (key_heads > 0 && value_heads > 0 && value_heads % key_heads != 0) {
        return message->add("%s: HV is %lld, must be a multiple of HK, which is %lld", spec.name,
                            static_cast<long long>(value_heads), static_cast<long long>(key_heads));
    }
    for (const Symbol symbol : {Symbol::kK, Symbol::kV}) {
        if (sizes[symbol] > 0 && sizes[symbol] % 8 != 0) {
            return message->add("%s: %s is %lld, must be a multiple of 8", spec.name,
                                dim_text({symbol, 0}).text, static_cast<long long>(sizes[symbol]));
        }
    }
    return check_launch(spec, call, message);
}

// The channels of q, k and v, where a plugin has all of the heads.
bool match_channels(const PluginSpec& spec, const Sizes& sizes, Message* message) noexcept {
    for (const Symbol symbol : {Symbol::kHK, Symbol::kHV, Symbol::kK, Symbol::kV, Symbol::kC}) {
        if (sizes[symbol] < 0) return true;
    }
    const int64_t keys = sizes[Symbol::kHK] * sizes[Symbol::kK];
    const int64_t channels = 2 * keys + sizes[Symbol::kHV] * sizes[Symbol::kV];
    if (sizes[Symbol::kC] == channels) return true;
    return message->add("%s: C is %lld, must be 2 HK K + HV V = %lld", spec.name,
                        static_cast<long long>(sizes[Symbol::kC]),
                        static_cast<long long>(channels));
}

bool match_all(const PluginSpec& spec, const Fields& fields, const Tensor* inputs,
               const Tensor* outputs, bool wild, Call* call, Message* message) noexcept {
    const Present in(spec.inputs, fields), out(spec.outputs, fields);
    return match_tensors(spec, "input", spec.inputs, in, inputs, wild, call, message) &&
           (outputs == nullptr ||
            match_tensors(spec, "output", spec.outputs, out, outputs, wild, call, message)) &&
           match_channels(spec, call->sizes, message);
}

Call start_call(const PluginSpec& spec, const Fields& fields) noexcept {
    Call call;
    call.fields = fields;
    if (spec.derive != nullptr) spec.derive(&call);
    return call;
}

int64_t tensor_bytes(const Tensor& tensor) noexcept {
    int64_t bytes = type_bytes(tensor.type);
    for (int i = 0; i < tensor.rank; ++i) bytes *= tensor.dims[i];
    return bytes;
}

bool check_cuda(const PluginSpec& spec, const char* what, const TensorSpec& tensor,
                cudaError_t status, Message* message) noexcept {
    if (status == cudaSuccess) return true;
    return message->add("%s: %s %s: %s", spec.name, what, tensor.name, cudaGetErrorString(status));
}

// An in-place output whose address is not its input's.
bool settle_mismatch(const PluginSpec& spec, const TensorSpec& output, const Tensor& tensor,
                     const void* source, void* target, Mismatch mismatch, treewy_stream stream,
                     Message* message) noexcept {
    const int64_t bytes = tensor_bytes(tensor);
    if (bytes == 0) return true;
    if (mismatch == Mismatch::kRefuse) {
        return message->add(
            "%s: output %s is at %p and its input at %p: it is updated in place, so both must be "
            "bound to one address",
            spec.name, output.name, target, source);
    }
    return check_cuda(spec, "copying", output,
                      cudaMemcpyAsync(target, source, static_cast<size_t>(bytes),
                                      cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
                      message);
}

bool prepare_output(const PluginSpec& spec, const TensorSpec& output, const Tensor& tensor,
                    const void* source, void* target, Mismatch mismatch, treewy_stream stream,
                    Message* message) noexcept {
    if (output.in_place >= 0 && source != target) {
        return settle_mismatch(spec, output, tensor, source, target, mismatch, stream, message);
    }
    if (!output.zeroed) return true;
    return check_cuda(spec, "clearing", output,
                      cudaMemsetAsync(target, 0, static_cast<size_t>(tensor_bytes(tensor)),
                                      static_cast<cudaStream_t>(stream)),
                      message);
}

}  // namespace

Sizes::Sizes() noexcept {
    for (int64_t& size : value) size = -1;
    (*this)[Symbol::kOne] = 1;
}

Call::Call() noexcept {
    for (Type& type : types) type = Type::kOther;
}

int32_t TensorSpec::rank() const noexcept {
    int32_t rank = 0;
    while (rank < kMaxRank && dims[rank].symbol != Symbol::kCount) ++rank;
    return rank;
}

Present::Present(const TensorSpec* table, const Fields& fields) noexcept {
    for (int32_t i = 0; i < kMaxTensors && table[i].name != nullptr; ++i) {
        const When when = table[i].when;
        if (when.field < 0 || fields.value[when.field] == when.value) place[count++] = i;
    }
}

int64_t type_bytes(Type type) noexcept {
    return type == Type::kBFloat16 || type == Type::kFloat16 ? 2 : 4;
}

const char* type_name(Type type) noexcept {
    switch (type) {
        case Type::kFloat32:
            return "float32";
        case Type::kBFloat16:
            return "bfloat16";
        case Type::kFloat16:
            return "float16";
        case Type::kInt32:
            return "int32";
        default:
            return "of another type";
    }
}

bool check_fields(const PluginSpec& spec, const Fields& fields, Message* message) noexcept {
    return check_limits(spec, start_call(spec, fields), message);
}

bool supports(const PluginSpec& spec, const Fields& fields, int32_t position,
              const Tensor* tensors) noexcept {
    const Present inputs(spec.inputs, fields), outputs(spec.outputs, fields);
    if (position < 0 || position >= inputs.count + outputs.count) return false;
    const auto find = [&](int32_t i) -> const TensorSpec& {
        return i < inputs.count ? spec.inputs[inputs.place[i]]
                                : spec.outputs[outputs.place[i - inputs.count]];
    };
    const Kind kind = find(position).kind;
    if (!tensors[position].linear || !may_have(kind, tensors[position].type)) return false;
    for (int32_t i = 0; i < position; ++i) {
        if (find(i).kind == kind) return tensors[i].type == tensors[position].type;
    }
    const Type given = start_call(spec, fields).types[static_cast<int>(kind)];
    return given == Type::kOther || given == tensors[position].type;
}

bool output_types(const PluginSpec& spec, const Fields& fields, const Type* inputs,
                  int32_t num_inputs, Type* outputs, Message* message) noexcept {
    const Present in(spec.inputs, fields), out(spec.outputs, fields);
    if (num_inputs != in.count) {
        return message->add("%s: takes %d inputs with these fields, got %d", spec.name, in.count,
                            num_inputs);
    }
    Call call = start_call(spec, fields);
    for (int32_t i = 0; i < in.count; ++i) {
        const TensorSpec& tensor = spec.inputs[in.place[i]];
        if (!match_type(spec, "input", tensor, inputs[i],
                        &call.types[static_cast<int>(tensor.kind)], message)) {
            return false;
        }
    }
    for (int32_t i = 0; i < out.count; ++i) {
        const Kind kind = spec.outputs[out.place[i]].kind;
        const Type bound = call.types[static_cast<int>(kind)];
        outputs[i] = bound == Type::kOther ? kKindTypes[static_cast<int>(kind)].types[0] : bound;
    }
    return true;
}

bool output_dim(const PluginSpec& spec, const Fields& fields, int32_t output, int32_t dim,
                OutputDim* from) noexcept {
    const Present in(spec.inputs, fields), out(spec.outputs, fields);
    if (output < 0 || output >= out.count) return false;
    const Dim wanted = spec.outputs[out.place[output]].dims[dim];
    const Sizes known = start_call(spec, fields).sizes;
    if (known[wanted.symbol] >= 0) {
        *from = {-1, 0, known[wanted.symbol] + wanted.plus};
        return true;
    }
    for (int32_t i = 0; i < in.count; ++i) {
        const TensorSpec& tensor = spec.inputs[in.place[i]];
        for (int32_t j = 0; j < tensor.rank(); ++j) {
            if (tensor.dims[j].symbol != wanted.symbol || tensor.dims[j].plus != wanted.plus) {
                continue;
            }
            *from = {i, j, 0};
            return true;
        }
    }
    return false;
}

bool check_tensors(const PluginSpec& spec, const Fields& fields, const Tensor* inputs,
                   const Tensor* outputs, bool wild, Message* message) noexcept {
    Call call = start_call(spec, fields);
    return match_all(spec, fields, inputs, outputs, wild, &call, message) &&
           check_limits(spec, call, message);
}

bool run(const PluginSpec& spec, const Fields& fields, const Tensor* input_tensors,
         const Tensor* output_tensors, const void* const* inputs, void* const* outputs,
         Mismatch mismatch, treewy_stream stream, Message* message) noexcept {
    Call call = start_call(spec, fields);
    if (!match_all(spec, fields, input_tensors, output_tensors, false, &call, message))
        return false;
    const Present in(spec.inputs, fields), out(spec.outputs, fields);
    for (int32_t i = 0; i < in.count; ++i) call.inputs[in.place[i]] = inputs[i];
    for (int32_t i = 0; i < out.count; ++i) {
        const TensorSpec& output = spec.outputs[out.place[i]];
        call.outputs[out.place[i]] = outputs[i];
        const void* source = output.in_place < 0 ? nullptr : call.inputs[output.in_place];
        if (!prepare_output(spec, output, output_tensors[i], source, outputs[i], mismatch, stream,
                            message)) {
            return false;
        }
    }
    call.stream = stream;
    if (spec.launch(call) == TREEWY_OK) return true;
    return message->add("%s: %s", spec.name, treewy_last_error());
}

}  // namespace treewy::plugin
