#include "distributed/launcher/node_state.h"

#include <nlohmann/json.hpp>

#include "core/error.h"

namespace sherd::dist {
namespace {

using Json = nlohmann::json;

// What a program prints need not be UTF-8.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json to_json(const RankEnd& end) {
  return {{"rank", end.rank},           {"local_rank", end.local_rank}, {"pid", end.pid},
          {"exit_code", end.exit_code}, {"signal", end.signal},         {"seconds", end.seconds},
          {"stopped", end.stopped},     {"error", end.error},           {"log", end.log}};
}

RankEnd end_from(const Json& json) {
  return {.rank = json.at("rank"),
          .local_rank = json.at("local_rank"),
          .pid = json.at("pid"),
          .exit_code = json.at("exit_code"),
          .signal = json.at("signal"),
          .seconds = json.at("seconds"),
          .stopped = json.at("stopped"),
          .error = json.at("error"),
          .log = json.at("log")};
}

template <class F>
auto parsed(const std::string& text, const F& read) {
  try {
    return read(Json::parse(text));
  } catch (const Json::exception& e) {
    fail("[launch] the nodes' store holds something else than sherdrun wrote: ", e.what());
  }
}

}  // namespace

std::string to_text(const NodeState& state) {
  Json ends = Json::array();
  for (const RankEnd& end : state.ends) ends.push_back(to_json(end));
  return dump({{"host", state.host},
               {"nproc", state.nproc},
               {"node_rank", state.node_rank},
               {"nnodes", state.nnodes},
               {"phase", int(state.phase)},
               {"round", state.round},
               {"ends", ends},
               {"reason", state.reason},
               {"beat", state.beat}});
}

NodeState node_state_from(const std::string& text) {
  return parsed(text, [](const Json& json) {
    NodeState state{.host = json.at("host"),
                    .nproc = json.at("nproc"),
                    .node_rank = json.at("node_rank"),
                    .nnodes = json.at("nnodes"),
                    .phase = NodeState::Phase(json.at("phase").get<int>()),
                    .round = json.at("round"),
                    .reason = json.at("reason"),
                    .beat = json.at("beat")};
    for (const Json& end : json.at("ends")) state.ends.push_back(end_from(end));
    return state;
  });
}

std::string to_text(const Decision& decision) {
  Json nodes = Json::array();
  for (const auto& node : decision.nodes) nodes.push_back({node.member, node.first_rank});
  return dump({{"kind", int(decision.kind)},
               {"round", decision.round},
               {"restarts", decision.restarts},
               {"nodes", nodes},
               {"world_size", decision.world_size},
               {"master_addr", decision.master_addr},
               {"master_port", decision.master_port},
               {"text", decision.text},
               {"exit_code", decision.exit_code},
               {"refused", decision.refused}});
}

Decision decision_from(const std::string& text) {
  return parsed(text, [](const Json& json) {
    Decision decision{.kind = Decision::Kind(json.at("kind").get<int>()),
                      .round = json.at("round"),
                      .restarts = json.at("restarts"),
                      .world_size = json.at("world_size"),
                      .master_addr = json.at("master_addr"),
                      .master_port = json.at("master_port"),
                      .text = json.at("text"),
                      .exit_code = json.at("exit_code")};
    for (const Json& node : json.at("nodes"))
      decision.nodes.push_back({.member = node.at(0), .first_rank = node.at(1)});
    for (const Json& refused : json.at("refused"))
      decision.refused.emplace_back(refused.at(0), refused.at(1));
    return decision;
  });
}

}  // namespace sherd::dist
