// Between checkpoint folders and files under PyTorch's names and layout, in one process.
//
//     to_full("run/step-000100", "model.safetensors", {.optimizer = "optimizer.safetensors"});
//     to_sharded("model.safetensors", "optimizer.safetensors", "run", 100);
//
// In Python: model.load_state_dict(safetensors.torch.load_file("model.safetensors")). The
// optimizer's file has "state.<parameter>.exp_avg" and so on: optim/optimizer.h.
#pragma once
#include <cstdint>
#include <string>

namespace sherd::dist {

struct ToFullOptions {
  std::string optimizer = "";  // where its state goes; empty: nowhere
  // Above 1: model-00001-of-00002.safetensors and so on, beside model.safetensors.index.json, which
  // says what is where, as PyTorch's hubs have it.
  int files = 1;
};

// The checkpoint may be of either format. Everything read is verified. A tensor at a time: memory
// is that of its largest piece. Errors: a damaged checkpoint, no optimizer's state where it was
// asked for.
void to_full(const std::string& checkpoint, const std::string& model,
             const ToFullOptions& options = {});

// A checkpoint of that step, which any number of ranks loads; schedule, position in the data and
// random states begin anew then. `model` may be an index of several files (….index.json);
// `optimizer` may be empty. Memory: all of it. Returns the checkpoint's folder.
std::string to_sharded(const std::string& model, const std::string& optimizer,
                       const std::string& folder, int64_t step);

}  // namespace sherd::dist
