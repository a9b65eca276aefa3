// What llama-server makes of replies: a line of JSON comes in, a line goes out.
// In: {"template", "tools", "replies": [...]}. Out: a list of messages; {"error"} for a reply that it refuses, and
// {"error"} alone for a template that it cannot use.

#include <chat.h>
#include <json.h>

#include <iostream>
#include <string>

using json = common_json;

static json parsed(const std::string & reply, const common_chat_parser_params & syntax) {
    try {
        const auto message = common_chat_parse(reply, false, syntax);
        json calls = json::array();
        for (const auto & call : message.tool_calls) {
            calls.push_back({{"name", call.name}, {"arguments", call.arguments}});
        }
        return {{"reasoning", message.reasoning_content}, {"content", message.content}, {"calls", calls}};
    } catch (const std::exception & error) {
        return {{"error", std::string(error.what()).substr(0, 200)}};
    }
}

static json answer(const json & asked) {
    const auto source = asked.at("template").get<std::string>();
    const auto templates = common_chat_templates_init(nullptr, source, "<s>", "</s>");
    common_chat_templates_inputs inputs;
    common_chat_msg user;
    user.role = "user";
    user.content = "Hi there";
    inputs.messages = {user};
    inputs.tools = common_chat_tools_parse_oaicompat(asked.at("tools"));
    inputs.parallel_tool_calls = true;
    inputs.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    const auto params = common_chat_templates_apply(templates.get(), inputs);
    common_chat_parser_params syntax(params);
    syntax.reasoning_format = inputs.reasoning_format;
    syntax.parser.load(params.parser);
    json found = json::array();
    for (const auto & reply : asked.at("replies")) {
        found.push_back(parsed(reply.get<std::string>(), syntax));
    }
    return found;
}

int main() {
    std::string line;
    while (std::getline(std::cin, line)) {
        json found;
        try {
            found = answer(json::parse(line));
        } catch (const std::exception & error) {
            found = {{"error", std::string(error.what()).substr(0, 400)}};
        }
        std::cout << found.dump() << std::endl;
    }
}
