// SPDX-License-Identifier: Apache-2.0
//
// The text of what went wrong. Fixed size: nothing is allocated where an engine runs.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>

namespace treewy::plugin {

class Message {
  public:
    const char* text() const noexcept { return text_; }

    // Appends. Returns false, so that a check can end with it:
    //     return message.add("%s: N is %d", name, n);
    __attribute__((format(printf, 2, 3))) bool add(const char* format, ...) noexcept {
        va_list arguments;
        va_start(arguments, format);
        const int length = std::vsnprintf(text_ + used_, sizeof(text_) - used_, format, arguments);
        va_end(arguments);
        if (length > 0) used_ += static_cast<size_t>(length);
        if (used_ >= sizeof(text_)) used_ = sizeof(text_) - 1;
        return false;
    }

  private:
    char text_[768] = {};
    size_t used_ = 0;
};

}  // namespace treewy::plugin
