/* The first program of the one-file executable: unpacks the application once, then becomes it.
 *
 *     | this program | application: zstd | settings, model (perhaps) | index: JSON | footer |
 *
 * The application is a stream of entries: a line "F|X|L SIZE PATH" (file, program, symbolic link), then SIZE bytes.
 * It goes to APP/KEY in the user's cache folder, where KEY is a hash of it, or to a private folder in a
 * temporary one where that cannot be. A lock keeps two starts apart; what a killed one left is replaced by the next.
 * Versions that nothing used for a month are removed when a new one is unpacked.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "zstd.h"

#define UNUSED_SECONDS (30 * 24 * 3600)
#define SPARE_BYTES (32u << 20)
#define FOLDERS 5
#define MAGIC "hetero file 1\n\0\0"

/* As in quant/one_file.py. */
struct footer {
    char magic[16];
    uint64_t app_offset, app_size, app_unpacked, index_offset, index_size;
    char key[16];
};

static char reasons[2048];

static void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("hetero: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

/* Why a folder was passed over; always 0. */
static int passed(const char *folder, const char *why) {
    size_t used = strlen(reasons);
    snprintf(reasons + used, sizeof reasons - used, "%s%s %s", used ? ", " : "", folder, why);
    return 0;
}

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *place) {
    (void)info, (void)kind, (void)place;
    return remove(path);
}

static void remove_tree(const char *path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

static int make_folders(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(path, 0755) && errno != EEXIST) { *slash = '/'; return 0; }
        *slash = '/';
    }
    return mkdir(path, 0755) == 0 || errno == EEXIST;
}

struct reader {
    int file;
    uint64_t left;
    ZSTD_DCtx *context;
    ZSTD_inBuffer in;
    ZSTD_outBuffer out;
    size_t position;
    int damaged;
};

static char in_bytes[1 << 17], out_bytes[1 << 18];

/* Decoded bytes at *data, at most `most`; 0 at the end or when damaged. */
static size_t take(struct reader *r, size_t most, char **data) {
    while (r->position == r->out.pos) {
        r->out.pos = r->position = 0;
        if (r->in.pos == r->in.size) {
            size_t want = r->left < sizeof in_bytes ? r->left : sizeof in_bytes;
            ssize_t got = want ? read(r->file, in_bytes, want) : 0;
            if (got <= 0) { r->damaged = 1; return 0; }
            r->left -= got, r->in.size = got, r->in.pos = 0;
        }
        if (ZSTD_isError(ZSTD_decompressStream(r->context, &r->out, &r->in))) { r->damaged = 1; return 0; }
    }
    size_t count = r->out.pos - r->position;
    if (count > most) count = most;
    *data = out_bytes + r->position;
    r->position += count;
    return count;
}

static int take_line(struct reader *r, char *line, size_t size) {
    for (size_t n = 0; n < size; n++) {
        char *byte;
        if (!take(r, 1, &byte)) return 0;
        line[n] = *byte;
        if (*byte == '\n') { line[n] = 0; return 1; }
    }
    r->damaged = 1;
    return 0;
}

/* One entry's bytes to a file. 0 with errno when it cannot be written. */
static int take_file(struct reader *r, const char *path, uint64_t size, int mode) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    if (file < 0) return 0;
    while (size) {
        char *data;
        size_t count = take(r, size < sizeof out_bytes ? size : sizeof out_bytes, &data);
        if (!count) { close(file); return 1; }
        size -= count;
        while (count) {
            ssize_t written = write(file, data, count);
            if (written < 0) { int error = errno; close(file); errno = error; return 0; }
            data += written, count -= written;
        }
    }
    return close(file) == 0;
}

static int take_link(struct reader *r, const char *path, uint64_t size) {
    char target[PATH_MAX] = "", *byte;
    for (uint64_t n = 0; n < size && n < sizeof target - 1; n++) {
        if (!take(r, 1, &byte)) return 1;
        target[n] = *byte;
    }
    return symlink(target, path) == 0;
}

static int unpack(int file, const struct footer *f, const char *folder) {
    struct reader r = {.file = file, .left = f->app_size, .context = ZSTD_createDCtx()};
    r.in.src = in_bytes, r.out.dst = out_bytes, r.out.size = sizeof out_bytes;
    if (!r.context || lseek(file, f->app_offset, SEEK_SET) < 0) die("cannot be read: %s", strerror(errno));
    char line[PATH_MAX], path[2 * PATH_MAX];
    while (take_line(&r, line, sizeof line) && strcmp(line, "END")) {
        char kind;
        unsigned long long size;
        int name = 0;
        if (sscanf(line, "%c %llu %n", &kind, &size, &name) != 2 || !name) { r.damaged = 1; break; }
        snprintf(path, sizeof path, "%s/%s", folder, line + name);
        char *slash = strrchr(path, '/');
        *slash = 0;
        int made = make_folders(path);
        *slash = '/';
        if (!made || !(kind == 'L' ? take_link(&r, path, size) : take_file(&r, path, size, kind == 'X' ? 0755 : 0644)))
            return 0;
        if (r.damaged) break;
    }
    ZSTD_freeDCtx(r.context);
    if (r.damaged) {
        remove_tree(folder);
        die("this file is damaged: its contents cannot be unpacked; copy it again");
    }
    return 1;
}

/* Whether programs of `needed` bytes can be put there and run. */
static int usable(const char *folder, uint64_t needed) {
    struct statvfs system;
    char probe[PATH_MAX + 32];
    if (statvfs(folder, &system)) return passed(folder, strerror(errno));
    if (system.f_flag & ST_NOEXEC) return passed(folder, "is mounted noexec");
    snprintf(probe, sizeof probe, "%s/.probe.%d", folder, (int)getpid());
    int file = open(probe, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (file < 0) return passed(folder, errno == EROFS ? "is read-only" : "cannot be written");
    close(file), unlink(probe);
    if ((uint64_t)system.f_bavail * system.f_frsize < needed + SPARE_BYTES) return passed(folder, "is full");
    return 1;
}

/* A version that is used has a shared lock on its file .used. */
static void forget_old(const char *folder, const char *key) {
    DIR *listing = opendir(folder);
    struct dirent *entry;
    while (listing && (entry = readdir(listing))) {
        char path[PATH_MAX + 256], used[PATH_MAX + 300];
        struct stat info;
        if (entry->d_name[0] == '.' || !strcmp(entry->d_name, key)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        snprintf(used, sizeof used, "%s/.used", path);
        if (stat(used, &info) || time(NULL) - info.st_mtime < UNUSED_SECONDS) continue;
        int file = open(used, O_RDONLY | O_CLOEXEC);
        if (file >= 0 && !flock(file, LOCK_EX | LOCK_NB)) remove_tree(path);
        if (file >= 0) close(file);
    }
    if (listing) closedir(listing);
}

/* Become the application in folder/KEY, if it is there. Its lock stays with the process. */
static void start(const char *folder, const struct footer *f, char **arguments) {
    char path[PATH_MAX + 64], used[PATH_MAX + 64];
    static char libraries[1 << 16];
    snprintf(path, sizeof path, "%s/%.16s/hetero", folder, f->key);
    snprintf(used, sizeof used, "%s/%.16s/.used", folder, f->key);
    if (access(path, X_OK)) return;
    /* PyInstaller's part of the program needs zlib, which a bare system may lack; ours go before any others */
    const char *others = getenv("LD_LIBRARY_PATH");
    snprintf(libraries, sizeof libraries, "%s/%.16s/_internal%s%s", folder, f->key, others && *others ? ":" : "",
             others ? others : "");
    setenv("LD_LIBRARY_PATH", libraries, 1);
    int file = open(used, O_RDWR);
    if (file >= 0) { flock(file, LOCK_SH | LOCK_NB); futimens(file, NULL); }
    arguments[0] = path; /* by which PyInstaller's part finds its file where /proc is not mounted */
    execv(path, arguments);
    if (file >= 0) close(file);
    passed(folder, strerror(errno));
}

static int install(int file, const struct footer *f, const char *folder) {
    char lock[PATH_MAX + 64], part[PATH_MAX + 64], path[PATH_MAX + 64], used[PATH_MAX + 128];
    if (!usable(folder, f->app_unpacked)) return 0;
    snprintf(lock, sizeof lock, "%s/.lock", folder);
    snprintf(path, sizeof path, "%s/%.16s", folder, f->key);
    snprintf(part, sizeof part, "%s/.part", folder);
    int locked = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (locked < 0 || flock(locked, LOCK_EX)) return passed(folder, strerror(errno));
    int done = access(path, F_OK) == 0; /* while we waited */
    if (!done) {
        remove_tree(part);
        snprintf(used, sizeof used, "%s/.used", part);
        if (mkdir(part, 0755) == 0 && unpack(file, f, part)) {
            int mark = open(used, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
            if (mark >= 0) close(mark);
            done = rename(part, path) == 0;
        }
        if (!done) { passed(folder, strerror(errno)); remove_tree(part); }
        if (done) forget_old(folder, f->key);
    }
    close(locked);
    return done;
}

/* Folder number n of those to try: the cache, then private ones in temporary folders. 0 when it cannot be. */
static int prepare(int n, char *folder) {
    const char *own = getenv("HETERO_CACHE_DIR"), *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const char *temporary[] = {getenv("TMPDIR"), "/tmp", "/var/tmp", "/dev/shm"};
    if (n == 0) {
        if (own && *own) snprintf(folder, PATH_MAX, "%s/app", own);
        else if (xdg && *xdg == '/') snprintf(folder, PATH_MAX, "%s/hetero/app", xdg);
        else if (home && *home) snprintf(folder, PATH_MAX, "%s/.cache/hetero/app", home);
        else return 0;
        return make_folders(folder) || passed(folder, errno == EROFS ? "is read-only" : "cannot be written");
    }
    const char *base = temporary[n - 1];
    struct stat info;
    if (!base || !*base) return 0;
    snprintf(folder, PATH_MAX, "%s/hetero-%d", base, (int)geteuid());
    if (mkdir(folder, 0700) && errno != EEXIST)
        return passed(base, errno == EROFS ? "is read-only" : errno == ENOENT ? "is not there" : "cannot be written");
    if (lstat(folder, &info) || !S_ISDIR(info.st_mode) || info.st_uid != geteuid() || info.st_mode & 077)
        return passed(folder, "belongs to somebody else"); /* what it holds would run as this user */
    return 1;
}

static void require_cpu(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
        die("this program needs a CPU with AVX2 (Intel since 2013, AMD since 2015), and this one has none; "
            "install hetero from source here");
#endif
}

int main(int count, char **arguments) {
    (void)count;
    static char self[PATH_MAX], folder[PATH_MAX];
    struct footer f;
    require_cpu();
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0 && !realpath((const char *)getauxval(AT_EXECFN), self)) die("cannot find its own file");
    int file = open(self, O_RDONLY | O_CLOEXEC);
    if (file < 0 || lseek(file, -(off_t)sizeof f, SEEK_END) < 0 || read(file, &f, sizeof f) != sizeof f)
        die("%s: cannot be read: %s", self, strerror(errno));
    if (memcmp(f.magic, MAGIC, sizeof f.magic)) die("%s: this file is cut off; copy it again", self);
    setenv("HETERO_EXECUTABLE", self, 1);
    for (int n = 0; n < FOLDERS; n++) {
        if (!prepare(n, folder)) continue;
        start(folder, &f, arguments);
        if (install(file, &f, folder)) start(folder, &f, arguments);
    }
    die("nowhere to unpack its %u MB: %s; set HETERO_CACHE_DIR to a folder that may hold programs",
        (unsigned)(f.app_unpacked >> 20), reasons);
}
