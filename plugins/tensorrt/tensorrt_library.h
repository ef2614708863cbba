// SPDX-License-Identifier: Apache-2.0
//
// The TensorRT libraries of this process, found without linking to one.
//
// One build of the plugins serves TensorRT 10 and 11. What TensorRT calls (the plugins and their
// creators) has the same layout in both; what it offers has not: ILogger, ILoggerFinder and
// IPluginRegistry got other virtual tables in 11. So those are called by the table of the version
// that made the object, and never through the headers that this was compiled with.
#pragma once

#include <NvInferRuntime.h>

namespace treewy::plugin {

// Writes to the log of the engine or builder that is calling, else of the process; to stderr where
// no TensorRT of a known version is there.
void log_error(const char* text) noexcept;

// What TensorRT passes to setLoggerFinder.
void set_logger_finder(void* finder) noexcept;

// Registers a creator at every TensorRT that is loaded. Does nothing while one of them is loading
// this library by itself: it will ask for the creators.
void register_at_load(nvinfer1::IPluginCreatorInterface* const* creators, int32_t count) noexcept;

}  // namespace treewy::plugin
