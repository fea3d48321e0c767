// All of Sherd. A program that uses it:
//
//     #include "sherd.h"
//     using namespace sherd;
//
// Checkpoints have a header of their own, distributed/checkpoint/checkpointer.h, since it brings
// JSON along.
#pragma once
#include "autograd/checkpoint.h"
#include "autograd/engine.h"
#include "autograd/grad_mode.h"
#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "autograd/record.h"
#include "core/allocator.h"
#include "core/gemm.h"
#include "core/generator.h"
#include "core/safetensors.h"
#include "core/threads.h"
#include "data/data_loader.h"
#include "data/dataset.h"
#include "data/evaluation_dataset.h"
#include "data/packed_dataset.h"
#include "data/sampler.h"
#include "data/text.h"
#include "data/token_dataset.h"
#include "data/tokenizer.h"
#include "distributed/ddp.h"
#include "distributed/distributed.h"
#include "distributed/fsdp.h"
#include "distributed/launcher/launcher.h"
#include "distributed/metrics.h"
#include "nn/nn.h"
#include "optim/adamw.h"
#include "optim/clip_grad.h"
#include "optim/lr_scheduler.h"
#include "optim/sgd.h"
