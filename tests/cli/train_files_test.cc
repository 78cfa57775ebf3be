// Parts of the program that need no torch: config, metrics and result of a run, text, GPU names.
#include <gmock/gmock.h>

#include <cmath>

#include "moxie/cli/file/error.h"
#include "moxie/cli/info/gpus.h"
#include "moxie/cli/text.h"
#include "moxie/cli/train/config.h"
#include "moxie/cli/train/metrics.h"
#include "moxie/cli/train/result.h"
#include "moxie/core/base/check.h"
#include "tests/cli/folder.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// ---- text --------------------------------------------------------------------------------------

TEST(Text, DidYouMeanTakesTheNearestWordAndNoFarOne) {
  const std::vector<std::string_view> known = {"steps", "seed", "seq_len", "batch"};
  EXPECT_EQ(did_you_mean("stesp", known), "; did you mean 'steps'?");
  EXPECT_EQ(did_you_mean("seq-len", known), "; did you mean 'seq_len'?");
  EXPECT_EQ(did_you_mean("learning_rate", known), "");
  EXPECT_EQ(did_you_mean("", {}), "");
  EXPECT_EQ(did_you_mean(std::string(100000, 's'), known), "");
}

TEST(Text, NumbersAreShort) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1536), "1.5 KiB");
  EXPECT_EQ(human_bytes(1e20), "90949470.2 TiB");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(12345), "12.3k");
  EXPECT_EQ(human_time(59.6), "1m 00s");
  EXPECT_EQ(human_time(3725), "1h 02m");
  EXPECT_EQ(human_time(-1), "0s");
}

TEST(Text, PrintsWordsForValuesThatAreNotFinite) {
  for (const double value : std::vector<double>{NAN, -NAN, INFINITY, -INFINITY}) {
    EXPECT_EQ(fixed(value, 2), "not finite");
    EXPECT_EQ(human_bytes(value), "not finite");
    EXPECT_EQ(human_count(value), "not finite");
    EXPECT_EQ(human_time(value), "not finite");
  }
}

TEST(Text, OfAFileIsNoCommandForTheTerminal) {
  EXPECT_EQ(plain("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(plain("a\x1b[2J\x07\r\n\t\x7f"), "a?[2J?????");
  EXPECT_EQ(plain("\xc2\x9b"
                  "31m"),
            "??31m")
      << "the control characters of ISO 6429";
  EXPECT_EQ(plain("\xe2\x80\xae"), "???") << "text turned right to left";
  EXPECT_EQ(plain("\x9b \xff \xc0\x9b \xe0\x80\x9b \xed\xa0\x80 \xf4\x90\x80\x80 \xc3"),
            "? ? ?? ??? ??? ???? ?");
  EXPECT_EQ(plain_lines("a\x1b\nb"), "a?\nb");
  Table table({"name"});
  table.add({"a\n\x1b[2J"});
  EXPECT_EQ(table.text(), "name\na??[2J\n");
}

TEST(Text, ATableAlignsItsColumns) {
  Table table({"name", "size"});
  table.add({"a", "10"});
  table.add({"longer", "7"});
  table.add({"only"});
  EXPECT_EQ(table.text(), "name    size\na         10\nlonger     7\nonly\n");
}

TEST(Gpus, KernelsRunOnTheirArchitectureAndOnWhatCanFollowIt) {
  EXPECT_TRUE(runs_on("90a-real", 90));
  EXPECT_TRUE(runs_on("90a-real 100a-real", 100));
  EXPECT_FALSE(runs_on("90a-real", 100));
  EXPECT_FALSE(runs_on("90a", 100)) << "an 'a' architecture is for one GPU alone";
  EXPECT_TRUE(runs_on("80-real", 86));
  EXPECT_FALSE(runs_on("80-real", 90));
  EXPECT_TRUE(runs_on("80", 90)) << "the driver compiles what is not for one machine";
  EXPECT_FALSE(runs_on("90-virtual", 80));
  EXPECT_FALSE(runs_on("", 90));
}

// ---- config ------------------------------------------------------------------------------------

TEST(Config, ComesBackFromJsonAsItWas) {
  const Folder folder;
  for (const Preset& known : presets()) {
    Config config = known.config;
    config.data = {"a b", "caf\xc3\xa9/\"x\""};
    config.lr = 0.1 + 0.2;
    config.recipe = {"experts=mxfp8_rceil", "re:.*wq=bf16"};
    config.tied_head = true;
    const std::string path = folder.write("config.json", to_json(config).dump(2));
    EXPECT_EQ(read_config(path, Config()), config) << known.name;
    EXPECT_NO_THROW(check(config));
  }
}

TEST(Config, FieldsOverTheBaseAndThePreset) {
  const Folder folder;
  EXPECT_EQ(read_config(folder.write("a", R"({"steps": 7})"), preset("small")).dim, 512);
  const Config config =
      read_config(folder.write("b", R"({"steps": 7, "preset": "llama4"})"), preset("small"));
  EXPECT_EQ(config.dim, 5120);
  EXPECT_EQ(config.steps, 7) << "a field wins over the preset, wherever it stands";
  EXPECT_EQ(config.preset, "llama4");
}

TEST(Config, OfARunThatKnewNoLastEvaluationKeepsWhatEvaluationsWere) {
  const Folder folder;
  auto json = to_json(preset("small"));
  json["eval_windows"] = 100;
  EXPECT_EQ(read_saved_config(folder.write("a", json.dump())).final_eval_windows, 4096);
  json.erase("final_eval_windows");
  const Config config = read_saved_config(folder.write("a", json.dump()));
  EXPECT_EQ(config.final_eval_windows, 100);
  EXPECT_EQ(config.dim, 512);
  json.erase("preset");
  EXPECT_THAT([&] { read_saved_config(folder.write("a", json.dump())); },
              ThrowsMessage<Error>(AllOf(HasSubstr(folder.path("a")), HasSubstr("\"preset\""))));
}

TEST(Config, ErrorsNameTheFileTheFieldAndTheValue) {
  const Folder folder;
  const auto expect = [&](const std::string& text, const std::string& message) {
    const std::string path = folder.write("x", text);
    EXPECT_THAT([&] { read_config(path, Config()); },
                ThrowsMessage<Error>(AllOf(HasSubstr(path), HasSubstr(message))));
  };
  expect(R"({"step": 7})", R"(there is no field "step"; did you mean 'steps'?)");
  expect(R"({"steps": "7"})", R"("steps" must be an integer, got "7")");
  expect(R"({"steps": 0})", "--steps must be 1 to 1e+09, got 0");
  expect(R"({"score": "relu"})", "--score must be one of softmax, sigmoid, got 'relu'");
  expect(R"({"recipe": "bf16"})", R"("recipe" must be a list of texts, got "bf16")");
  expect(R"({"out": "a\u0000b"})", "--out must be UTF-8 without zero bytes");
  expect(R"({"preset": "tiyn"})", "did you mean 'tiny'?");
  expect(R"({"lr": 1, "lr": 2})", R"(has twice the key "lr")");
  expect("[1]", "must be an object of fields, got array");
  expect("steps: 7", "this is no JSON");
  EXPECT_THROW(read_config(folder.path("absent"), Config()), IoError);
}

TEST(Config, FlagsAreParsedWholeOrRefused) {
  const auto set = [](std::string_view name, const Words& words) {
    Config config;
    for (const Field& field : fields())
      if (field.name == name) set_from_words(config, field, words);
    return config;
  };
  EXPECT_EQ(set("steps", {"12"}).steps, 12);
  EXPECT_EQ(set("lr", {"1e-3"}).lr, 1e-3);
  EXPECT_EQ(set("tied_head", {"true"}).tied_head, true);
  EXPECT_THAT(set("data", {"a", "b"}).data, ElementsAre("a", "b"));
  for (const char* word : {"", "12x", "1.5", "0x10", "99999999999999999999", " 1"})
    EXPECT_THROW(set("steps", {word}), Error) << word;
  for (const char* word : {"nan", "inf", "-1", "1e400", "1,5"})
    EXPECT_THROW(set("lr", {word}), Error) << word;
  EXPECT_THROW(set("tied_head", {"yes"}), Error);
  EXPECT_THROW(set("steps", {"1", "2"}), Error);
  EXPECT_THAT([&] { set("out", {"\xff"}); },
              ThrowsMessage<Error>(HasSubstr("--out must be UTF-8")));
}

TEST(Config, ChecksFieldsAgainstEachOther) {
  Config config;
  config.kv_heads = 3;
  EXPECT_THAT([&] { check(config); }, ThrowsMessage<Error>(HasSubstr("--kv-heads, got 4 and 3")));
  config = {.experts = 2, .top_k = 3};
  EXPECT_THAT([&] { check(config); }, ThrowsMessage<Error>(HasSubstr("--experts, got 3 and 2")));
  config = {.recipe = {}};
  EXPECT_THROW(check(config), Error);
}

// ---- metrics -----------------------------------------------------------------------------------

TEST(Metrics, GoOnWithoutTornLinesAndLaterSteps) {
  const Folder folder;
  const std::string kept = "{\"event\":\"step\",\"step\":1}\n{\"event\":\"eval\",\"step\":2}\n";
  folder.write("m", kept + "{\"step\":3}\n\n7\n{\"step\":\"1\"}\n{\"step\":2.5}\n{}\n{\"ste\n" +
                        "{\"event\":\"step\",\"step\":2");
  {
    Metrics metrics(folder.path("m"), 2);
    EXPECT_EQ(folder.read("m"), kept);
    metrics.write({{"step", 3}, {"loss", std::nan("")}});
    EXPECT_EQ(folder.read("m"), kept + "{\"step\":3,\"loss\":null}\n");
  }
  { Metrics metrics(folder.path("m"), 0); }
  EXPECT_EQ(folder.read("m"), "");
  EXPECT_THAT(folder.names(), ElementsAre("m"));
  EXPECT_THROW(Metrics(folder.path("no/m"), 0), IoError);
}

TEST(Metrics, DropTheFinalEvaluationWhichComesAgain) {
  const Folder folder;
  const std::string kept = "{\"event\":\"eval\",\"step\":2,\"final\":false}\n";
  folder.write("m", kept + "{\"event\":\"eval\",\"step\":2,\"final\":true}\n");
  { Metrics metrics(folder.path("m"), 2); }
  EXPECT_EQ(folder.read("m"), kept);
}

// ---- results -----------------------------------------------------------------------------------

TEST(Result, IsWhatTrainWroteOrAnErrorWithThePath) {
  const Folder folder;
  const Result written{.steps = 3, .eval_loss = NAN, .eval_windows = 40, .device = "cpu"};
  auto json = to_json(written);
  const Result result = read_result(folder.write("result.json", json.dump()));
  EXPECT_EQ(result.steps, 3);
  EXPECT_TRUE(std::isnan(result.eval_loss));
  EXPECT_EQ(result.eval_windows, 40);
  json.erase("eval_windows");
  EXPECT_EQ(read_result(folder.write("result.json", json.dump())).eval_windows, 0);
  const std::string good = json.dump();
  for (const std::string& text : {std::string(), good.substr(0, 40), std::string("[1]"),
                                  std::string(R"({"steps": "three"})")})
    EXPECT_THAT([&] { read_result(folder.write("result.json", text)); },
                ThrowsMessage<Error>(HasSubstr("result.json")))
        << text;
}

TEST(Result, IsReadIfTheRunHasDoneAllSteps) {
  const Folder folder;
  EXPECT_FALSE(finished_result(folder.path("result.json"), 3));
  Result result;
  result.steps = 3;
  folder.write("result.json", to_json(result).dump());
  EXPECT_TRUE(finished_result(folder.path("result.json"), 3));
  EXPECT_FALSE(finished_result(folder.path("result.json"), 4));
}

TEST(Result, HasIntegersThatAreIntegers) {
  const Folder folder;
  for (const char* value : {"1e300", "2.5", "18446744073709551615", "null"}) {
    auto json = to_json(Result());
    json["peak_memory_bytes"] = nlohmann::json::parse(value);
    EXPECT_THAT([&] { read_result(folder.write("result.json", json.dump())); },
                ThrowsMessage<Error>(HasSubstr("\"peak_memory_bytes\" must be an integer")))
        << value;
  }
}

}  // namespace
}  // namespace moxie::testing
