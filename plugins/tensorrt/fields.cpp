// SPDX-License-Identifier: Apache-2.0
//
// Fields as TensorRT hands them over, on creation and from a serialised engine.
#include <cstring>

#include "contract.h"

namespace treewy::plugin {
namespace {

int32_t find_field(const PluginSpec& spec, const char* name) noexcept {
    for (int32_t i = 0; spec.fields[i].name != nullptr; ++i) {
        if (std::strcmp(spec.fields[i].name, name) == 0) return i;
    }
    return -1;
}

bool read_number(const PluginSpec& spec, const FieldSpec& field, const GivenField& given,
                 int32_t* value, Message* message) noexcept {
    const bool wide = given.type == GivenType::kInt64;
    if ((!wide && given.type != GivenType::kInt32) || given.length != 1 || given.data == nullptr) {
        return message->add("%s: field %s must be one int32", spec.name, field.name);
    }
    int64_t number = 0;
    if (wide) {
        std::memcpy(&number, given.data, sizeof(int64_t));
    } else {
        int32_t narrow = 0;
        std::memcpy(&narrow, given.data, sizeof(int32_t));
        number = narrow;
    }
    const int64_t low = field.is_flag() ? 0 : 1, high = field.is_flag() ? 1 : INT32_MAX;
    if (number < low || number > high) {
        return message->add("%s: field %s is %lld, must be from %lld to %lld", spec.name,
                            field.name, static_cast<long long>(number), static_cast<long long>(low),
                            static_cast<long long>(high));
    }
    *value = static_cast<int32_t>(number);
    return true;
}

bool read_choice(const PluginSpec& spec, const FieldSpec& field, const GivenField& given,
                 int32_t* value, Message* message) noexcept {
    if (given.type != GivenType::kChar || given.data == nullptr || given.length < 0) {
        return message->add("%s: field %s must be a string", spec.name, field.name);
    }
    // With or without the zero at the end.
    const char* text = static_cast<const char*>(given.data);
    size_t length = static_cast<size_t>(given.length);
    while (length > 0 && text[length - 1] == '\0') --length;
    int32_t choice = 0;
    for (const char* one : field.choices) {
        if (one != nullptr && std::strlen(one) == length && std::memcmp(one, text, length) == 0) {
            *value = choice;
            return true;
        }
        ++choice;
    }
    message->add("%s: field %s is '%.*s', must be", spec.name, field.name,
                 static_cast<int>(length < 64 ? length : 64), text);
    const char* joint = " ";
    for (const char* one : field.choices) {
        if (one != nullptr) message->add("%s%s", joint, one);
        joint = " or ";
    }
    return false;
}

bool refuse_unknown(const PluginSpec& spec, const char* name, Message* message) noexcept {
    message->add("%s: there is no field %s, only", spec.name, name);
    const char* joint = " ";
    for (int32_t i = 0; spec.fields[i].name != nullptr; ++i) {
        message->add("%s%s", joint, spec.fields[i].name);
        joint = ", ";
    }
    return false;
}

}  // namespace

bool parse_fields(const PluginSpec& spec, const GivenField* given, int32_t count, Fields* fields,
                  Message* message) noexcept {
    bool seen[kMaxFields] = {};
    *fields = Fields{};
    for (int32_t i = 0; i < count; ++i) {
        const char* name = given[i].name == nullptr ? "(without a name)" : given[i].name;
        const int32_t at = find_field(spec, name);
        if (at < 0) return refuse_unknown(spec, name, message);
        if (seen[at]) return message->add("%s: field %s is given twice", spec.name, name);
        seen[at] = true;
        const FieldSpec& field = spec.fields[at];
        const auto read = field.type == FieldType::kString ? read_choice : read_number;
        if (!read(spec, field, given[i], &fields->value[at], message)) return false;
    }
    for (int32_t i = 0; spec.fields[i].name != nullptr; ++i) {
        if (seen[i]) continue;
        if (spec.fields[i].default_value < 0) {
            return message->add("%s: field %s is missing", spec.name, spec.fields[i].name);
        }
        fields->value[i] = spec.fields[i].default_value;
    }
    return check_fields(spec, *fields, message);
}

}  // namespace treewy::plugin
