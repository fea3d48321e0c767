// Whether ops record on the tape, for this thread:
//
//     { NoGrad guard;  y = model(x); }         // no graph, as torch.no_grad()
//     GradMode on(true);                       // for the scope
#pragma once

namespace sherd {

bool grad_enabled();

class GradMode {
 public:
  [[nodiscard]] explicit GradMode(bool on);
  ~GradMode();
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;

 private:
  bool before_;
};

class NoGrad : public GradMode {
 public:
  [[nodiscard]] NoGrad() : GradMode(false) {}
};

}  // namespace sherd
