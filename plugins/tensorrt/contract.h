// SPDX-License-Identifier: Apache-2.0
//
// What a plugin takes and gives, as data: fields, inputs, outputs, and the checks of both against
// it. Plain C++, so that adapters to any version of TensorRT share it. trtllm_treewy/
// plugin_contract.py is the same list for Python; a test compares them.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../include/treewy.h"
#include "message.h"

namespace treewy::plugin {

inline constexpr const char* kNamespace = "treewy";
inline constexpr const char* kVersion = "1";

// ------------------------------------------------------------------ tensors

enum class Type : int32_t {
    kFloat32 = TREEWY_FLOAT32,
    kBFloat16 = TREEWY_BFLOAT16,
    kFloat16 = TREEWY_FLOAT16,
    kInt32,
    kOther
};

// Which types a tensor may have; the tensors of one kind in one node have one type.
enum class Kind : int32_t { kActivation, kGate, kWeight, kState, kStash, kFloat32, kInt32, kCount };

inline constexpr int kMaxRank = 8;
inline constexpr int kMaxTensors = 16;

// A tensor as TensorRT describes it; a dimension that is not known yet is -1.
struct Tensor {
    Type type = Type::kOther;
    bool linear = true;
    int32_t rank = 0;
    int64_t dims[kMaxRank] = {};
};

// Symbols of the shapes. kOne is the number 1.
enum class Symbol : int32_t { kB, kN, kT, kL, kSlots, kHK, kHV, kK, kV, kC, kW, kH, kOne, kCount };

// A dimension in a table: a symbol, and what is added to it. kCount: beyond the rank.
struct Dim {
    Symbol symbol = Symbol::kCount;
    int32_t plus = 0;
};

// A field and the value of it that a tensor is there with; field -1: always.
struct When {
    int32_t field = -1;
    int32_t value = 0;
};

struct TensorSpec {
    const char* name;
    Kind kind;
    Dim dims[kMaxRank];
    When when = {};
    int32_t in_place = -1;  // of an output: the input whose memory it is
    bool zeroed = false;    // of an output: the launch adds to it

    int32_t rank() const noexcept;
};

// ------------------------------------------------------------------ fields

inline constexpr int kMaxFields = 8;

enum class FieldType : int32_t { kInt32, kString };

// A field's value is an int32; a string is the index of its choice.
struct FieldSpec {
    const char* name;
    FieldType type;
    int32_t default_value = -1;   // -1: required
    const char* choices[4] = {};  // of a string

    bool is_flag() const noexcept { return type == FieldType::kInt32 && default_value >= 0; }
};

struct Fields {
    int32_t value[kMaxFields] = {};
};

// A field as it comes from outside.
enum class GivenType : int32_t { kInt32, kInt64, kChar, kOther };

struct GivenField {
    const char* name;
    const void* data;
    GivenType type;
    int32_t length;
};

// ------------------------------------------------------------------ plugins

// Sizes by symbol; -1 where not known.
struct Sizes {
    int64_t value[static_cast<int>(Symbol::kCount)];

    Sizes() noexcept;
    int64_t& operator[](Symbol symbol) noexcept { return value[static_cast<int>(symbol)]; }
    int64_t operator[](Symbol symbol) const noexcept { return value[static_cast<int>(symbol)]; }
};

// Everything that a launch needs. Without data (null inputs and outputs, B = T = 0) a launcher
// checks the limits of its kernels and launches nothing.
struct Call {
    Fields fields;
    Sizes sizes;
    Type types[static_cast<int>(Kind::kCount)];
    const void* inputs[kMaxTensors] = {};  // by place in the table; null where absent
    void* outputs[kMaxTensors] = {};
    treewy_stream stream = nullptr;

    Call() noexcept;
    template <typename T>
    const T* input(int index) const noexcept {
        return static_cast<const T*>(inputs[index]);
    }
    template <typename T>
    T* output(int index) const noexcept {
        return static_cast<T*>(outputs[index]);
    }
    int32_t size(Symbol symbol) const noexcept { return static_cast<int32_t>(sizes[symbol]); }
    int32_t type(Kind kind) const noexcept {
        return static_cast<int32_t>(types[static_cast<int>(kind)]);
    }
};

// One plugin. The lists end with a null name.
struct PluginSpec {
    const char* name;
    FieldSpec fields[kMaxFields + 1];
    TensorSpec inputs[kMaxTensors + 1];
    TensorSpec outputs[kMaxTensors + 1];
    // Sets the sizes and types that the fields give; may be null.
    void (*derive)(Call*);
    treewy_status (*launch)(const Call&);
};

// The tensors of a table that are there with some fields, in order.
struct Present {
    int32_t count = 0;
    int32_t place[kMaxTensors] = {};  // in the table

    Present(const TensorSpec* table, const Fields& fields) noexcept;
};

// ------------------------------------------------------------------ checks
//
// They return false and say why.

// Fields from what was given: unknown, repeated, missing ones and wrong values are refused, and
// what check_fields refuses.
bool parse_fields(const PluginSpec& spec, const GivenField* given, int32_t count, Fields* fields,
                  Message* message) noexcept;

// What the kernels refuse whatever the inputs.
bool check_fields(const PluginSpec& spec, const Fields& fields, Message* message) noexcept;

// Whether tensor `position` (inputs, then outputs) may have this type beside those before it.
bool supports(const PluginSpec& spec, const Fields& fields, int32_t position,
              const Tensor* tensors) noexcept;

// Types of the outputs from those of the inputs.
bool output_types(const PluginSpec& spec, const Fields& fields, const Type* inputs,
                  int32_t num_inputs, Type* outputs, Message* message) noexcept;

// Where a size of an output comes from: dimension `dim` of input `input`, or `constant`.
struct OutputDim {
    int32_t input = -1;
    int32_t dim = 0;
    int64_t constant = 0;
};

bool output_dim(const PluginSpec& spec, const Fields& fields, int32_t output, int32_t dim,
                OutputDim* from) noexcept;

// Types, shapes and limits of inputs and outputs. With `wild`, dimensions of -1 fit everything.
bool check_tensors(const PluginSpec& spec, const Fields& fields, const Tensor* inputs,
                   const Tensor* outputs, bool wild, Message* message) noexcept;

// What happens where an in-place output has not the address of its input.
enum class Mismatch { kRefuse, kCopy };

// Checks and launches.
bool run(const PluginSpec& spec, const Fields& fields, const Tensor* input_tensors,
         const Tensor* output_tensors, const void* const* inputs, void* const* outputs,
         Mismatch mismatch, treewy_stream stream, Message* message) noexcept;

int64_t type_bytes(Type type) noexcept;
const char* type_name(Type type) noexcept;

}  // namespace treewy::plugin
