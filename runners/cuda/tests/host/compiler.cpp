// Stands in for libnvrtc.so.13: makes a shared object of the kernels by a C++ compiler. Files that need a device's own instructions are left
// out, and whoever launches a kernel of theirs is told so. HOST_DIALECT is the path of the dialect, HOST_THREADS the threads of a block.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

using std::string;

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

struct Program {
    string source, log, image;
};
enum { COMPILED = 0, COMPILATION_FAILED = 6 };

static const std::set<string> LEFT_OUT = {"attend.cu", "mla.cu", "warpgroup.cu", "context.cu", "measure.cu"};

// The kernels, and whether each has one thread an element, in whatever blocks.
typedef std::vector<std::pair<string, bool>> Kernels;

static string translate(const string &source, Kernels &kernels) {
    std::istringstream lines(source);
    string line, text;
    bool kept = true;
    while (std::getline(lines, line)) {
        if (line.rfind("#line 1 \"", 0) == 0) kept = !LEFT_OUT.count(line.substr(9, line.size() - 10));
        if (!kept) continue;
        if (line == "#define SC_THREADS 128") line = "#define SC_THREADS " TEXT(HOST_THREADS);
        if (line.rfind("SC_EXPORT ", 0) == 0) kernels.push_back({line.substr(10, line.find('(') - 10), false});
        if (!kernels.empty() && line.find("SC_INDEX") != string::npos) kernels.back().second = true;
        text += line + "\n";
    }
    return text;
}

static string compile(Program &program) {
    Kernels kernels;
    const string text = translate(program.source, kernels);
    const char *temporary = getenv("TMPDIR");
    string folder = string(temporary ? temporary : "/tmp") + "/shardcheck-host.XXXXXX";
    if (!mkdtemp(&folder[0])) return "";
    std::ofstream file(folder + "/kernels.cpp");
    file << "#include " TEXT(HOST_DIALECT) "\n" << text << "#line 1 \"table\"\n";
    file << "extern \"C\" void *find_kernel(const char *name) {\n";
    for (const auto &[name, indexed] : kernels)
        file << "static Kernel " << name << "_{[](void **a) { call(" << name << ", a); }, " << indexed
             << "}; if (!std::strcmp(name, \"" << name << "\")) return &" << name << "_;\n";
    file << "return nullptr; }\n";
    file.close();
    const string object = folder + "/kernels.so", log = folder + "/log";
    const string command = "g++ -std=c++17 -O1 -ffp-contract=off -w -shared -fPIC -DHOST_THREADS=" TEXT(HOST_THREADS) " -o " + object +
                           " " + folder + "/kernels.cpp 2> " + log;
    const int failed = system(command.c_str());
    std::stringstream said;
    said << std::ifstream(log).rdbuf();
    program.log = said.str();
    return failed ? "" : object;
}

extern "C" {
int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, COMPILED; }
const char *nvrtcGetErrorString(int) { return "an error of the host's compiler"; }
int nvrtcCreateProgram(void **program, const char *source, const char *, int, const void *, const void *) {
    return *program = new Program{source, "", ""}, COMPILED;
}
int nvrtcDestroyProgram(void **program) { return delete (Program *)*program, COMPILED; }
int nvrtcCompileProgram(void *program, int, const char *const *) {
    Program &of = *(Program *)program;
    of.image = compile(of);
    return of.image.empty() ? COMPILATION_FAILED : COMPILED;
}
int nvrtcGetProgramLogSize(void *program, size_t *size) { return *size = ((Program *)program)->log.size() + 1, COMPILED; }
int nvrtcGetProgramLog(void *program, char *log) { return strcpy(log, ((Program *)program)->log.c_str()), COMPILED; }
int nvrtcGetCUBINSize(void *program, size_t *size) { return *size = ((Program *)program)->image.size() + 1, COMPILED; }
int nvrtcGetCUBIN(void *program, char *image) { return strcpy(image, ((Program *)program)->image.c_str()), COMPILED; }
}
