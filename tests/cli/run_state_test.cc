// read_run() and finished_result(): what the files of a run's folder say is used only if another
// file confirms it.
#include "moxie/cli/train/run_state.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include "moxie/cli/file/error.h"
#include "moxie/cli/file/lock.h"
#include "moxie/core/base/check.h"
#include "tests/cli/run_files.h"

namespace moxie::testing {
namespace {

using namespace moxie::cli;
using Json = nlohmann::ordered_json;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

class RunStateTest : public ::testing::Test {
 protected:
  void stopped() const { files_.write(RunFiles::End::kStopped); }
  void finished() const { files_.write(RunFiles::End::kFinished); }

  std::string read(const std::string& path) const {
    return folder_.read(std::filesystem::relative(path, folder_.path()).string());
  }
  void write(const std::string& path, const std::string& text) const {
    folder_.write(std::filesystem::relative(path, folder_.path()).string(), text);
  }
  void edit(const std::string& path, const std::string& from, const std::string& to) const {
    std::string text = read(path);
    const size_t at = text.find(from);
    ASSERT_NE(at, text.npos) << from;
    write(path, text.replace(at, from.size(), to));
  }
  // Changes the metadata of a checkpoint and writes the right checksum, as a forger would.
  void forge(int64_t step, const std::function<void(Json&)>& change) const {
    const std::string path = files_.checkpoint(step), file = read(path);
    Json header = Json::parse(header_of(file));
    Json& text = header["__metadata__"][kCheckpointKey];
    Json about = Json::parse(text.get<std::string>());
    change(about);
    text = about.dump();
    write(path, with_checksum(with_header(file, header.dump())));
  }
  void refuses(const std::string& message) const {
    EXPECT_THAT([&] { read_all(); }, ThrowsMessage<Error>(HasSubstr(message)));
  }
  Words notes() const { return read_all().notes; }
  RunState read_all() const {
    RunState state = read_run(files_.run);
    finished_result(files_.run, state.config.steps, state);
    return state;
  }

  Folder folder_;
  RunFiles files_{folder_};
};

TEST_F(RunStateTest, AcceptsAnUnchangedFolder) {
  stopped();
  RunState state = read_run(files_.run);
  EXPECT_THAT(state.notes, IsEmpty());
  EXPECT_EQ(state.newest->saved.position.step, 4);
  EXPECT_FALSE(finished_result(files_.run, 4, state));
  finished();
  state = read_run(files_.run);
  EXPECT_EQ(finished_result(files_.run, 4, state)->eval_loss, 5.25);
  EXPECT_THAT(state.notes, IsEmpty());
  EXPECT_FALSE(finished_result(files_.run, 5, state));
  EXPECT_THAT([&] { finished_result(files_.run, 3, state); },
              ThrowsMessage<Error>(HasSubstr("has taken 4 steps already, got 3")));
}

TEST_F(RunStateTest, RefusesAConfigThatIsNotTheCheckpoints) {
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"\"lr\": 0.0005", "\"lr\": 0.0004"},
                                                        {"\"seed\": 1", "\"seed\": 3"},
                                                        {"mxfp8_rceil_128", "mxfp8_rceil"},
                                                        {"\"warmup\": 80", "\"warmup\": 90"}}) {
    stopped();
    edit(files_.run.config(), from, to);
    refuses("one of the two was edited or damaged");
  }
  stopped();
  forge(4, [](Json& about) { about["config"]["lr"] = 0.25; });
  refuses("\"lr\" is 0.0005 in '" + files_.run.config() + "' and 0.25 in '");
}

TEST_F(RunStateTest, SaysWhatAResumedRunMayChange) {
  stopped();
  edit(files_.run.config(), "\"threads\": 1", "\"threads\": 2");
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("\"threads\" is 2")));
  stopped();
  edit(files_.run.config(), "\"steps\": 4", "\"steps\": 6");
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("\"steps\" is 6")));
  stopped();
  edit(files_.run.config(), "\"title\": \"\"", "\"title\": \"x\"");
  EXPECT_THAT(notes(), IsEmpty());
}

TEST_F(RunStateTest, ChoosesTheCheckpointByTheStepInside) {
  stopped();
  std::filesystem::rename(files_.checkpoint(4), files_.run.checkpoints() + "/step-1.safetensors");
  const RunState state = read_run(files_.run);
  EXPECT_EQ(state.newest->saved.position.step, 4);
  EXPECT_THAT(state.notes, ElementsAre(HasSubstr("step-1.safetensors' holds step 4")));
}

TEST_F(RunStateTest, TellsNineDigitsFromEight) {
  Metrics metrics(folder_.path("m"), 0);
  std::filesystem::create_directories(files_.run.checkpoints());
  for (const int64_t step : {99999999, 100000000}) files_.save(step, metrics);
  const std::vector<Checkpoint> found = find_checkpoints(files_.run.checkpoints());
  EXPECT_EQ(found.at(0).saved.position.step, 100000000);
}

TEST_F(RunStateTest, RefusesACheckpointThatCannotBeReadUnlessItIsOlder) {
  stopped();
  write(files_.checkpoint(4), read(files_.checkpoint(4)).substr(0, 100));
  refuses(files_.checkpoint(4));
  stopped();
  write(files_.checkpoint(2), "x");
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("it is not needed")));
  stopped();
  write(files_.run.checkpoints() + "/step-best.safetensors", "x");
  refuses("step-best.safetensors");
}

TEST_F(RunStateTest, RefusesAForgedCheckpointWithARightChecksum) {
  stopped();
  std::string file = read(files_.checkpoint(4));
  file[file.size() - 40] ^= 1;  // a weight
  write(files_.checkpoint(4), with_checksum(file));
  EXPECT_NO_THROW(read_safetensors(files_.checkpoint(4)));
  refuses("is not the checkpoint that");
  stopped();
  forge(4, [](Json& about) { about["position"]["window"] = 65; });
  refuses("are not the 65 that it says");
}

TEST_F(RunStateTest, HoldsARunWithoutItsConfig) {
  EXPECT_FALSE(holds_run(files_.run));
  refuses("holds no run");
  stopped();
  for (const std::string& path : {files_.run.config(), files_.run.metrics()})
    std::filesystem::remove(path);
  EXPECT_TRUE(holds_run(files_.run));
  refuses("holds a run without its config.json");
}

TEST_F(RunStateTest, SaysWhatNothingConfirms) {
  stopped();
  std::filesystem::remove_all(files_.run.checkpoints());
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("has no checkpoint yet")));
  stopped();
  std::filesystem::remove(files_.run.metrics());
  EXPECT_THAT(notes(), Contains(HasSubstr("is unchecked but for its own checksum")));
  finished();
  std::filesystem::remove(files_.run.metrics());
  EXPECT_THAT(notes(), Contains(HasSubstr("result.json' is unchecked")));
}

TEST_F(RunStateTest, NoticesEditedMetrics) {
  stopped();
  edit(files_.run.metrics(), "5.5", "4.5");
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("is not what the run wrote up to step 4")));
  stopped();
  write(files_.run.metrics(), "{\"step\": tru\n" + read(files_.run.metrics()));
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("has 1 lines that no run writes")));
  finished();
  write(files_.run.metrics(), read(files_.run.metrics()) + "{\"event\":\"eval\",\"step\":9}\n");
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("1 lines of steps that the run did not take")));
}

TEST_F(RunStateTest, RefusesAnEditedResult) {
  finished();
  edit(files_.run.result(), "5.25", "4.25");
  refuses("is not what the run wrote");
  finished();
  edit(files_.run.metrics(), "5.25", "4.25");
  refuses("are not the same");
  // Metrics of older versions had no line with the checksum of result.json.
  finished();
  const std::string lines = read(files_.run.metrics());
  write(files_.run.metrics(), lines.substr(0, lines.rfind("{\"event\":\"result\"")));
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("result.json' is unchecked")));
  edit(files_.run.result(), "5.25", "4.25");
  refuses("are not the same");
}

// A recursive parser would exhaust the stack on 200,000 brackets.
TEST_F(RunStateTest, RefusesJsonNestedTooDeeply) {
  const std::string deep(200000, '[');
  stopped();
  write(files_.run.metrics(), read(files_.run.metrics()) + deep + "\n");
  EXPECT_THAT(notes(), ElementsAre(HasSubstr("lines that no run writes")));
  EXPECT_NO_THROW(Metrics(files_.run.metrics(), 4));
  stopped();
  const std::string file = read(files_.checkpoint(4));
  Json header = Json::parse(header_of(file));
  header["__metadata__"][kCheckpointKey] = "{\"config\":" + deep;
  write(files_.checkpoint(4), with_checksum(with_header(file, header.dump())));
  refuses("nested too deeply");
}

TEST_F(RunStateTest, WeightsHitNoFileOfTheRun) {
  stopped();
  const std::string in = files_.run.path;
  for (const char* name : {"config.json", "metrics.jsonl", "result.json", "lock", "checkpoints",
                           "checkpoints/step-00000004.safetensors", "checkpoints/new/w",
                           "checkpoints/../config.json", "./lock"})
    EXPECT_TRUE(is_file_of_run(files_.run, in + "/" + name)) << name;
  EXPECT_FALSE(is_file_of_run(files_.run, in + "/weights.safetensors"));
  EXPECT_FALSE(is_file_of_run(files_.run, in + "/checkpoints.safetensors"));
  EXPECT_FALSE(is_file_of_run(files_.run, folder_.path("config.json")));
  std::filesystem::create_directory_symlink(files_.run.checkpoints(), folder_.path("link"));
  EXPECT_TRUE(is_file_of_run(files_.run, folder_.path("link/w")));
  EXPECT_TRUE(is_inside(files_.run, in + "/w"));
  EXPECT_FALSE(is_inside(files_.run, in + "/../w"));
  EXPECT_FALSE(is_inside(files_.run, in + "2/w"));
}

TEST_F(RunStateTest, WritesNothingThroughLinks) {
  std::filesystem::create_directories(folder_.path("elsewhere"));
  std::filesystem::create_directories(files_.run.path);
  std::filesystem::create_directory_symlink(folder_.path("elsewhere"), files_.run.checkpoints());
  EXPECT_THAT([&] { make_checkpoint_folder(files_.run); },
              ThrowsMessage<IoError>(HasSubstr("it is a link")));
  for (const std::string& path : {files_.run.lock(), files_.run.metrics()})
    std::filesystem::create_symlink(folder_.path("elsewhere/x"), path);
  EXPECT_THROW(FolderLock lock(files_.run.lock()), IoError);
  { Metrics(files_.run.metrics(), 0).write({{"step", 1}}); }
  EXPECT_TRUE(
      std::filesystem::is_regular_file(std::filesystem::symlink_status(files_.run.metrics())));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path("elsewhere")));
}

TEST_F(RunStateTest, CleansUpItsOwnHalfWrittenFilesAlone) {
  stopped();
  for (const char* name : {"run/w.unfinished", "run/config.json.a1b2c3.unfinished",
                           "run/checkpoints/w.a1b2c3.unfinished",
                           "run/checkpoints/step-00000006.safetensors.a1b2c3.unfinished",
                           "run/checkpoints/step-00000006.safetensors.unfinished"})
    folder_.write(name, "half");
  remove_unfinished_files(files_.run);
  EXPECT_EQ(folder_.read("run/w.unfinished"), "half");
  EXPECT_EQ(folder_.read("run/checkpoints/w.a1b2c3.unfinished"), "half");
  EXPECT_FALSE(std::filesystem::exists(folder_.path("run/config.json.a1b2c3.unfinished")));
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator(files_.run.checkpoints()))
    ++count;
  EXPECT_EQ(count, 3u) << "two checkpoints and the user's file";
}

TEST_F(RunStateTest, IsLockedForOneProcess) {
  stopped();
  const FolderLock lock(files_.run.lock());
  EXPECT_THAT([&] { FolderLock(files_.run.lock()); },
              ThrowsMessage<Error>(HasSubstr("another process trains in this folder")));
}

TEST_F(RunStateTest, StaysLockedWithoutTheLockFile) {
  stopped();
  const FolderLock lock(files_.run.lock());
  std::filesystem::remove(files_.run.lock());
  EXPECT_THAT([&] { FolderLock(files_.run.lock()); },
              ThrowsMessage<Error>(HasSubstr("another process trains in this folder")));
}

TEST_F(RunStateTest, NoticesThatItsFolderWasMovedOrReplaced) {
  stopped();
  const FolderLock lock(files_.run.lock());
  EXPECT_NO_THROW(lock.check_folder());
  std::filesystem::rename(files_.run.path, folder_.path("moved"));
  EXPECT_THAT([&] { lock.check_folder(); }, ThrowsMessage<IoError>(HasSubstr("moved or replaced")));
  std::filesystem::create_directory(files_.run.path);
  EXPECT_THROW(lock.check_folder(), IoError);
}

}  // namespace
}  // namespace moxie::testing
