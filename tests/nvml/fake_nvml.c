/* A stand-in for libnvidia-ml.so.1 that the real pynvml module loads and calls through its real ABI.
 *
 * Everything it says comes from a script; without one it answers like a machine that has no driver.
 * One statement a line, '#' starts a comment, T is in seconds of the fake's clock:
 *
 *   driver 580.126.09                     the driver's version
 *   gpus 2                                devices 0..1 exist
 *   name G TEXT                           product name of device G
 *   uuid G TEXT                           UUID of device G
 *   mig G N                               device G is partitioned into N instances
 *   at T gpu G KEY VALUE [SLOPE]          from T on KEY is VALUE (+ SLOPE a second); G is a number, G:M an instance, or *
 *   error FUNCTION G CODE FROM TO         FUNCTION fails with CODE on device G (or *) while FROM <= now < TO
 *   hang FUNCTION G SECONDS FROM TO       FUNCTION blocks that long (or until fake_nvml_release) while FROM <= now < TO
 *   lost G FROM TO                        device G is lost; a session from before TO never gets it back
 *   reload FROM TO                        the driver is away; a session from before TO is dead
 *   xid T G NUMBER                        one Xid event
 *
 * The clock stands still between calls of fake_nvml_time; until the first of them it is the real one since loading.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_GPUS 8
#define MAX_MIG 7
#define MAX_POINTS 64
#define MAX_RULES 64
#define MAX_CALLS 64
#define FOREVER 1e18

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, TIMEOUT = 10, LIBRARY_NOT_FOUND = 12, GPU_IS_LOST = 15 };

/* Keys of `at`; a key that was never set is NOT_SUPPORTED. */
#define KEYS(X) X(utilization) X(memory_utilization) X(sm_clock) X(memory_clock) X(max_sm_clock) X(power) X(power_limit) \
    X(energy) X(temperature) X(reasons) X(memory_used) X(memory_total) X(pcie_rx) X(pcie_tx) X(nvlink_rx) X(nvlink_tx) \
    X(ecc_corrected) X(ecc_uncorrected) X(dram_active) X(sm_occupancy) X(gpm_pcie_rx) X(gpm_pcie_tx)
#define AS_ENUM(k) K_##k,
#define AS_NAME(k) #k,
enum key { KEYS(AS_ENUM) KEY_COUNT };
static const char *key_names[] = { KEYS(AS_NAME) };

struct point { double at, value, slope; };
struct series { int count; struct point points[MAX_POINTS]; };
/* The handle given to callers is the address of one of these. */
struct device { int gpu, mig; };
struct rule { int kind; char function[64]; int gpu; double amount, from, to; };
struct xid { double at; int gpu; unsigned long long number; int taken; };
struct calls { char function[64]; long count; };
struct event_set { unsigned mask; };
struct gpm_sample { int gpu, mig; double at; };

static struct {
    int loaded, gpus, migs[MAX_GPUS];
    char driver[80], names[MAX_GPUS][96], uuids[MAX_GPUS][96];
    struct series series[MAX_GPUS][MAX_MIG + 1][KEY_COUNT];   /* [gpu][0] is the whole GPU, [gpu][1 + mig] an instance */
    int rule_count, xid_count;
    struct rule rules[MAX_RULES];
    struct xid xids[MAX_RULES];
} script;

static struct device devices[MAX_GPUS][MAX_MIG + 1];
static struct calls calls[MAX_CALLS];
static int call_count;
static int init_references;
static double init_at, manual_now = -1, loaded_at;
static volatile int released;

static double real_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static double now(void) { return manual_now >= 0 ? manual_now : real_now() - loaded_at; }

/* ---- what tests call ---- */

void fake_nvml_time(double seconds) { manual_now = seconds; }
void fake_nvml_release(void) { released = 1; }
int fake_nvml_references(void) { return init_references; }

long fake_nvml_calls(const char *function) {
    for (int i = 0; i < call_count; i++)
        if (!strcmp(calls[i].function, function)) return calls[i].count;
    return 0;
}

static int parse_gpu(const char *text, int *mig) {
    if (mig) *mig = -1;
    if (*text == '*') return -1;
    const char *colon = strchr(text, ':');
    if (colon && mig) *mig = atoi(colon + 1);
    return atoi(text);
}

static void put(int gpu, int mig, int key, struct point point) {
    struct series *series = &script.series[gpu][mig + 1][key];
    if (series->count < MAX_POINTS) series->points[series->count++] = point;
}

/* Whether one line of the script makes sense; it is taken in. */
static int statement(char *line) {
    char a[64], b[64], c[96];
    double x, y, z;
    int number;
    struct point point = { 0, 0, 0 };
    line[strcspn(line, "#\n")] = 0;
    if (!line[strspn(line, " \t")]) return 1;
    if (sscanf(line, " driver %79s", script.driver) == 1) return 1;
    if (sscanf(line, " gpus %d", &script.gpus) == 1) return script.gpus <= MAX_GPUS;
    if (sscanf(line, " name %63s %95[^\n]", a, c) == 2) return strcpy(script.names[parse_gpu(a, NULL)], c) != NULL;
    if (sscanf(line, " uuid %63s %95s", a, c) == 2) return strcpy(script.uuids[parse_gpu(a, NULL)], c) != NULL;
    if (sscanf(line, " mig %63s %d", a, &number) == 2) {
        script.migs[parse_gpu(a, NULL)] = number;
        return number <= MAX_MIG;
    }
    if (sscanf(line, " at %lf gpu %63s %63s %lf %lf", &point.at, a, b, &point.value, &point.slope) >= 4) {
        int key = 0, mig, gpu = parse_gpu(a, &mig);
        while (key < KEY_COUNT && strcmp(key_names[key], b)) key++;
        if (key == KEY_COUNT || gpu >= MAX_GPUS || mig >= MAX_MIG) return 0;
        if (gpu >= 0) put(gpu, mig, key, point);
        else for (gpu = 0; gpu < MAX_GPUS; gpu++) put(gpu, -1, key, point);
        return 1;
    }
    if (sscanf(line, " xid %lf %63s %lf", &x, a, &y) == 3 && script.xid_count < MAX_RULES) {
        script.xids[script.xid_count++] = (struct xid){ x, parse_gpu(a, NULL), (unsigned long long)y, 0 };
        return 1;
    }
    struct rule rule = { *line, "", -1, 0, 0, FOREVER };
    if (sscanf(line, "error %63s %63s %lf %lf %lf", rule.function, b, &x, &y, &z) == 5 ||
        sscanf(line, "hang %63s %63s %lf %lf %lf", rule.function, b, &x, &y, &z) == 5) {
        rule.gpu = parse_gpu(b, NULL);
        rule.amount = x;
        rule.from = y;
        rule.to = z;
    } else if (sscanf(line, "lost %63s %lf %lf", b, &rule.from, &rule.to) == 3) {
        rule.gpu = parse_gpu(b, NULL);
    } else if (sscanf(line, "reload %lf %lf", &rule.from, &rule.to) != 2) {
        return 0;
    }
    if (script.rule_count == MAX_RULES) return 0;
    script.rules[script.rule_count++] = rule;
    return 1;
}

/* 0, or the number of the first line that makes no sense, or -1 when the file cannot be opened. */
int fake_nvml_script(const char *path) {
    char line[512];
    int number = 0, bad = 0;
    memset(&script, 0, sizeof script);
    memset(calls, 0, sizeof calls);
    call_count = 0;
    init_references = 0;
    released = 0;
    for (int g = 0; g < MAX_GPUS; g++)
        for (int m = -1; m < MAX_MIG; m++) devices[g][m + 1] = (struct device){ g, m };
    if (!path) return 0;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    loaded_at = real_now();
    strcpy(script.driver, "0.0");
    while (!bad && fgets(line, sizeof line, file)) {
        number++;
        if (!statement(line)) bad = number;
    }
    fclose(file);
    script.loaded = 1;
    return bad;
}

__attribute__((constructor)) static void on_load(void) {
    loaded_at = real_now();
    fake_nvml_script(getenv("FAKE_NVML_SCRIPT"));
}

/* ---- what every call does first ---- */

static int is_device(const struct device *device) {
    const char *low = (const char *)devices, *high = (const char *)(devices + MAX_GPUS), *at = (const char *)device;
    return at >= low && at < high && (at - low) % sizeof(struct device) == 0;
}

static int enter(const char *function, const struct device *device) {
    int i = 0, gpu = -1;
    while (i < call_count && strcmp(calls[i].function, function)) i++;
    if (i == call_count && call_count < MAX_CALLS) strcpy(calls[call_count++].function, function);
    if (i < MAX_CALLS) calls[i].count++;
    if (!script.loaded) return LIBRARY_NOT_FOUND;
    if (device) {
        if (!is_device(device)) return INVALID_ARGUMENT;
        gpu = device->gpu;
    }
    double at = now();
    int opening = !strncmp(function, "nvmlInit", 8);
    int failed = SUCCESS;
    if (!opening && init_references == 0) return UNINITIALIZED;
    for (i = 0; i < script.rule_count; i++) {
        struct rule *rule = &script.rules[i];
        int active = at >= rule->from && at < rule->to;
        int stale = at >= rule->to && init_at < rule->to;
        int here = rule->gpu < 0 || gpu < 0 || rule->gpu == gpu;
        if (rule->kind == 'r' && active) failed = opening ? DRIVER_NOT_LOADED : UNINITIALIZED;
        if (rule->kind == 'r' && stale && !opening && init_at < rule->from) failed = UNINITIALIZED;
        if (rule->kind == 'l' && gpu >= 0 && here && (active || (stale && !opening))) failed = GPU_IS_LOST;
        if (!active || !here || strcmp(rule->function, function)) continue;
        if (rule->kind == 'e') failed = (int)rule->amount;
        if (rule->kind == 'h') {
            double until = real_now() + rule->amount;
            struct timespec slice = { 0, 2 * 1000 * 1000 };
            while (real_now() < until && !released) nanosleep(&slice, NULL);
        }
    }
    return failed;
}

#define ENTER(device) do { int entered = enter(__func__, device); if (entered) return entered; } while (0)

static int value(const struct device *device, enum key key, double *out) {
    const struct series *series = &script.series[device->gpu][device->mig + 1][key];
    double at = now();
    for (int i = series->count - 1; i >= 0; i--)
        if (series->points[i].at <= at) {
            *out = series->points[i].value + series->points[i].slope * (at - series->points[i].at);
            return SUCCESS;
        }
    return NOT_SUPPORTED;
}

static int unsigned_value(const struct device *device, enum key key, unsigned *out) {
    double figure;
    int code = value(device, key, &figure);
    if (code == SUCCESS) *out = (unsigned)figure;
    return code;
}

static int text(const char *from, char *to, unsigned size) {
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

/* ---- the ABI: names and layouts as nvidia-ml-py calls them ---- */

typedef struct device *Device;

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ENTER(NULL);
    if (init_references++ == 0) init_at = now();
    return SUCCESS;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    /* Shutting down works however broken the driver is. */
    enter(__func__, NULL);
    if (init_references == 0) return UNINITIALIZED;
    init_references--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { (void)code; return "an error of the fake"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) { ENTER(NULL); return text(script.driver, out, size); }

int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(NULL); *out = script.gpus; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *out) {
    if (index >= (unsigned)script.gpus) return INVALID_ARGUMENT;
    ENTER(&devices[index][0]);
    *out = &devices[index][0];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *out, unsigned size) {
    char made[96];
    ENTER(device);
    if (device->mig >= 0) snprintf(made, sizeof made, "MIG-%08x-0000-0000-0000-%012x", device->gpu, device->mig);
    else if (script.uuids[device->gpu][0]) strcpy(made, script.uuids[device->gpu]);
    else snprintf(made, sizeof made, "GPU-%08x-0000-0000-0000-000000000000", device->gpu);
    return text(made, out, size);
}

int nvmlDeviceGetName(Device device, char *out, unsigned size) {
    ENTER(device);
    return text(script.names[device->gpu][0] ? script.names[device->gpu] : "Fake GPU", out, size);
}

struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(Device device, struct utilization *out) {
    ENTER(device);
    int code = unsigned_value(device, K_utilization, &out->gpu);
    if (code) return code;
    if (unsigned_value(device, K_memory_utilization, &out->memory)) out->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(Device device, unsigned type, unsigned *out) {
    ENTER(device);
    return unsigned_value(device, type == 2 ? K_memory_clock : K_sm_clock, out);
}

int nvmlDeviceGetMaxClockInfo(Device device, unsigned type, unsigned *out) {
    ENTER(device);
    return type == 1 ? unsigned_value(device, K_max_sm_clock, out) : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerUsage(Device device, unsigned *out) { ENTER(device); return unsigned_value(device, K_power, out); }

int nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *out) {
    ENTER(device);
    return unsigned_value(device, K_power_limit, out);
}

int nvmlDeviceGetTotalEnergyConsumption(Device device, uint64_t *out) {
    double figure;
    ENTER(device);
    int code = value(device, K_energy, &figure);
    if (code == SUCCESS) *out = (uint64_t)figure;
    return code;
}

int nvmlDeviceGetTemperature(Device device, unsigned sensor, unsigned *out) {
    (void)sensor;
    ENTER(device);
    return unsigned_value(device, K_temperature, out);
}

static int reasons(Device device, unsigned long long *out) {
    double figure;
    int code = value(device, K_reasons, &figure);
    if (code == SUCCESS) *out = (unsigned long long)figure;
    return code;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device device, unsigned long long *out) { ENTER(device); return reasons(device, out); }

int nvmlDeviceGetCurrentClocksThrottleReasons(Device device, unsigned long long *out) { ENTER(device); return reasons(device, out); }

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(Device device, struct memory *out) {
    double total, used;
    ENTER(device);
    if (value(device, K_memory_total, &total) || value(device, K_memory_used, &used)) return NOT_SUPPORTED;
    *out = (struct memory){ total, total - used, used };
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(Device device, unsigned counter, unsigned *out) {
    ENTER(device);
    return unsigned_value(device, counter == 0 ? K_pcie_tx : K_pcie_rx, out);
}

struct field {
    uint32_t id, scope;
    int64_t timestamp, latency;
    unsigned type, code;
    union { double d; unsigned ui; unsigned long ul; unsigned long long ull; } value;
};
int nvmlDeviceGetFieldValues(Device device, int count, struct field *fields) {
    double figure;
    ENTER(device);
    for (int i = 0; i < count; i++) {
        int transmit = fields[i].id == 138, receive = fields[i].id == 139;
        fields[i].type = 3;
        fields[i].code = transmit || receive ? SUCCESS : INVALID_ARGUMENT;
        if (fields[i].code) continue;
        fields[i].code = value(device, transmit ? K_nvlink_tx : K_nvlink_rx, &figure);
        if (fields[i].code) continue;
        /* As the driver does: scope UINT_MAX is the sum over all links, a number is one of them (18 here). */
        fields[i].value.ull = (unsigned long long)(fields[i].scope == UINT32_MAX ? figure : figure / 18);
    }
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device device, unsigned type, unsigned counter, unsigned long long *out) {
    double figure;
    (void)counter;
    ENTER(device);
    int code = value(device, type == 0 ? K_ecc_corrected : K_ecc_uncorrected, &figure);
    if (code == SUCCESS) *out = (unsigned long long)figure;
    return code;
}

int nvmlEventSetCreate(struct event_set **out) {
    ENTER(NULL);
    *out = calloc(1, sizeof **out);
    return SUCCESS;
}

int nvmlEventSetFree(struct event_set *set) { enter(__func__, NULL); free(set); return SUCCESS; }

int nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *out) { ENTER(device); *out = 8 | 1 | 2; return SUCCESS; }

int nvmlDeviceRegisterEvents(Device device, unsigned long long types, struct event_set *set) {
    ENTER(device);
    if (types & 8) set->mask |= 1u << device->gpu;
    return SUCCESS;
}

struct event { Device device; unsigned long long type, data; unsigned gpu_instance, compute_instance; };
int nvmlEventSetWait_v2(struct event_set *set, struct event *out, unsigned timeout) {
    (void)timeout;
    ENTER(NULL);
    for (int i = 0; i < script.xid_count; i++) {
        struct xid *xid = &script.xids[i];
        if (xid->taken || xid->at > now() || !(set->mask & (1u << xid->gpu))) continue;
        xid->taken = 1;
        *out = (struct event){ &devices[xid->gpu][0], 8, xid->number, UINT32_MAX, UINT32_MAX };
        return SUCCESS;
    }
    return TIMEOUT;
}

int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    ENTER(device);
    *current = *pending = script.migs[device->gpu] > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *out) { ENTER(device); *out = MAX_MIG; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *out) {
    ENTER(device);
    if (index >= (unsigned)script.migs[device->gpu]) return NOT_FOUND;
    *out = &devices[device->gpu][index + 1];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(Device device, unsigned *out) {
    ENTER(device);
    if (device->mig < 0) return INVALID_ARGUMENT;
    *out = device->mig + 1;
    return SUCCESS;
}

struct gpm_support { unsigned version, supported; };
int nvmlGpmQueryDeviceSupport(Device device, struct gpm_support *out) {
    double figure;
    ENTER(device);
    if (out->version != 1) return INVALID_ARGUMENT;
    out->supported = 0;
    for (int mig = -1; mig < MAX_MIG; mig++) {
        struct device part = { device->gpu, mig };
        if (value(&part, K_dram_active, &figure) == SUCCESS) out->supported = 1;
    }
    return SUCCESS;
}

int nvmlGpmSampleAlloc(struct gpm_sample **out) { ENTER(NULL); *out = calloc(1, sizeof **out); return SUCCESS; }

int nvmlGpmSampleFree(struct gpm_sample *sample) { enter(__func__, NULL); free(sample); return SUCCESS; }

int nvmlGpmSampleGet(Device device, struct gpm_sample *sample) {
    ENTER(device);
    if (script.migs[device->gpu]) return NOT_SUPPORTED;
    *sample = (struct gpm_sample){ device->gpu, -1, now() };
    return SUCCESS;
}

int nvmlGpmMigSampleGet(Device device, unsigned instance, struct gpm_sample *sample) {
    ENTER(device);
    *sample = (struct gpm_sample){ device->gpu, (int)instance - 1, now() };
    return SUCCESS;
}

struct gpm_metric { unsigned id, code; double value; char *names[3]; };
struct gpm_get { unsigned version, count; struct gpm_sample *first, *second; struct gpm_metric metrics[]; };
int nvmlGpmMetricsGet(struct gpm_get *get) {
    struct device part = { get->second->gpu, get->second->mig };
    ENTER(&devices[part.gpu][part.mig + 1]);
    if (get->version != 1 || get->first->at >= get->second->at) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < get->count; i++) {
        struct gpm_metric *metric = &get->metrics[i];
        enum key key = metric->id == 3 ? K_sm_occupancy : metric->id == 10 ? K_dram_active
                     : metric->id == 20 ? K_gpm_pcie_tx : K_gpm_pcie_rx;
        metric->code = value(&part, key, &metric->value);
    }
    return SUCCESS;
}
