// All of optim.
#pragma once
#include "optim/adamw.h"
#include "optim/clip_grad.h"
#include "optim/grad_scaler.h"
#include "optim/lr_scheduler.h"
#include "optim/muon.h"
#include "optim/sgd.h"
