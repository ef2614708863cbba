// SPDX-License-Identifier: Apache-2.0
//
// Launches of prefill on tensor cores, one a type of the inputs, each compiled in a file of its
// own. prefill.cu has checked everything and made the plan.
#pragma once

#include "device.cuh"
#include "prefill_plan.h"

namespace treewy {

treewy_status prefill_bfloat16(const char* name, const treewy_prefill_params& p,
                               const PrefillPlan& plan, treewy_stream stream);
treewy_status prefill_float16(const char* name, const treewy_prefill_params& p,
                              const PrefillPlan& plan, treewy_stream stream);

}  // namespace treewy
