// Plays the exchanges between devices in host memory: the kernels that lay out and take apart, compiled by a C++ compiler with one thread a
// block, and a collective that copies. What several devices come to must be what one device comes to, byte by byte.
#include <cstdio>
#include <cstdlib>
#include <vector>

using std::vector;

template <class Kernel> static void launch(long blocks, long y, Kernel kernel) {
    for (long b = 0; b < y; b++)
        for (long a = 0; a < blocks; a++) {
            blockIdx.x = (int)a;
            blockIdx.y = (int)b;
            kernel();
        }
}

static unsigned noise(unsigned seed) {
    seed = (seed ^ 61u) ^ (seed >> 16);
    seed *= 9u;
    seed ^= seed >> 4;
    seed *= 0x27d4eb2du;
    return seed ^ (seed >> 15);
}

// Ranks of a session over devices, as the host lays them out: rank r on device r mod G.
struct Session {
    int devices, ranks, world;
    int seats() const { return devices < ranks ? devices : ranks; }
    int of(int seat) const { return (ranks - seat + devices - 1) / devices; }
    Shape shape(int seat, int own) const {
        Shape s{};
        s.ranks = of(seat), s.first = seat, s.step = devices, s.all = ranks, s.world = world;
        s.own = own, s.heads = own * world, s.width = s.heads + 1, s.key_dim = 3, s.interleave = 2, s.block = 4, s.blocks = 8;
        return s;
    }
};

// One group as its devices see it.
struct Members {
    vector<int> seats;
    int places, turn;
};

static Members members(const Session &p, int number) {
    Members m{{}, (p.world + p.devices - 1) / p.devices, 0};
    vector<bool> there(p.devices, false);
    for (int r = number * p.world; r < (number + 1) * p.world; r++) there[r % p.devices] = true;
    for (int seat = 0; seat < p.devices; seat++)
        if (there[seat]) m.seats.push_back(seat);
    const int first = number * p.world % p.devices;
    while (m.seats[m.turn] != first) m.turn++;
    return m;
}

static Group group(const Session &p, const Members &m, int number, int seat) {
    Group g{0, 0, (int)m.seats.size(), m.places, m.turn};
    for (int r = seat; r < p.ranks; r += p.devices) {
        g.first += r < number * p.world;
        g.count += r / p.world == number;
    }
    return g;
}

template <class T> using OfSeats = vector<vector<T>>;

static OfSeats<u8> gather(const Session &p, const OfSeats<u8> &from, int bytes) {
    OfSeats<u8> to(p.seats());
    for (int seat = 0; seat < p.seats(); seat++) to[seat].assign((long)p.of(seat) * p.world * bytes, 0xEE);
    for (int number = 0; number < p.ranks / p.world; number++) {
        const Members m = members(p, number);
        vector<u8> all((long)m.seats.size() * m.places * bytes, 0xEE);
        for (size_t i = 0; i < m.seats.size(); i++) {
            const Group g = group(p, m, number, m.seats[i]);
            for (long at = 0; at < (long)g.count * bytes; at++)
                all[(long)i * m.places * bytes + at] = from[m.seats[i]][(long)g.first * bytes + at];
        }
        for (int seat : m.seats) {
            const Group g = group(p, m, number, seat);
            const Shape s = p.shape(seat, 1);
            launch((long)g.count * p.world * bytes, 1,
                   [&] { spread_gathered(s, g, all.data(), bytes, to[seat].data()); });
        }
    }
    return to;
}

static OfSeats<u16> exchange(const Session &p, const OfSeats<u16> &from, int words) {
    OfSeats<u16> to(p.seats());
    for (int seat = 0; seat < p.seats(); seat++) to[seat].assign((long)p.of(seat) * p.world * words, 0xEEEE);
    for (int number = 0; number < p.ranks / p.world; number++) {
        const Members m = members(p, number);
        const long piece = (long)m.places * m.places * words, devices = (long)m.seats.size();
        OfSeats<u16> bundles(devices, vector<u16>(devices * piece, 0xEEEE)), arrived = bundles;
        for (long i = 0; i < devices; i++) {
            const Group g = group(p, m, number, m.seats[i]);
            const Shape s = p.shape(m.seats[i], 1);
            launch(devices * g.count * g.places * words, 1,
                   [&] { bundle_words(s, g, from[m.seats[i]].data(), words, bundles[i].data()); });
        }
        for (long i = 0; i < devices; i++)
            for (long j = 0; j < devices; j++)
                for (long at = 0; at < piece; at++) arrived[j][i * piece + at] = bundles[i][j * piece + at];
        for (long i = 0; i < devices; i++) {
            const Group g = group(p, m, number, m.seats[i]);
            const Shape s = p.shape(m.seats[i], 1);
            launch((long)g.count * p.world * words, 1,
                   [&] { spread_arrived(s, g, arrived[i].data(), words, to[m.seats[i]].data()); });
        }
    }
    return to;
}

static OfSeats<float> reduce(const Session &p, const OfSeats<float> &from, int elements) {
    OfSeats<float> to(p.seats());
    for (int seat = 0; seat < p.seats(); seat++) to[seat].assign((long)p.of(seat) * elements, -1.0f);
    for (int number = 0; number < p.ranks / p.world; number++) {
        const Members m = members(p, number);
        const long devices = (long)m.seats.size(), piece = (long)m.places * elements;
        vector<float> total(devices * piece, 0.0f);
        for (int seat : m.seats) {
            const Group g = group(p, m, number, seat);
            const Shape s = p.shape(seat, 1);
            vector<float> sums(devices * piece, -1.0f);
            launch(devices * piece, 1, [&] { sum_members(s, g, from[seat].data(), elements, 0, sums.data()); });
            for (size_t at = 0; at < sums.size(); at++) total[at] += sums[at];
        }
        for (long i = 0; i < devices; i++) {
            const Group g = group(p, m, number, m.seats[i]);
            for (long at = 0; at < (long)g.count * elements; at++)
                to[m.seats[i]][(long)g.first * elements + at] = total[i * piece + at];
        }
    }
    return to;
}

static int failures = 0;

// The part of a rank-major tensor that a device's ranks have.
template <class T> static vector<T> part(const Session &p, int seat, const vector<T> &whole) {
    const long each = (long)whole.size() / p.ranks;
    vector<T> own;
    for (int r = seat; r < p.ranks; r += p.devices)
        own.insert(own.end(), whole.begin() + r * each, whole.begin() + (r + 1) * each);
    return own;
}

template <class T> static void same(const char *what, const Session &p, const OfSeats<T> &seen, const vector<T> &whole) {
    for (int seat = 0; seat < p.seats(); seat++)
        if (seen[seat] != part(p, seat, whole)) {
            failures++;
            printf("%s differs: %d devices, %d ranks, world %d, device %d\n", what, p.devices, p.ranks, p.world, seat);
        }
}

static void moved(const Session &p) {
    const Session one{1, p.ranks, p.world};
    const Shape s = one.shape(0, 1);
    const int words = 5, bytes = 2 * words;
    vector<u16> sent((long)p.ranks * p.world * words), received(sent.size());
    for (size_t at = 0; at < sent.size(); at++) sent[at] = (u16)noise((unsigned)at);
    launch((long)sent.size(), 1, [&] { exchange_words(s, sent.data(), words, received.data()); });
    OfSeats<u16> pieces(p.seats());
    for (int seat = 0; seat < p.seats(); seat++) pieces[seat] = part(p, seat, sent);
    same("all-to-all", p, exchange(p, pieces, words), received);

    vector<u8> own((long)p.ranks * bytes), gathered(own.size() * p.world);
    for (size_t at = 0; at < own.size(); at++) own[at] = (u8)noise((unsigned)at);
    launch((long)gathered.size(), 1, [&] { gather_bytes(s, own.data(), bytes, gathered.data()); });
    OfSeats<u8> given(p.seats());
    for (int seat = 0; seat < p.seats(); seat++) given[seat] = part(p, seat, own);
    same("all-gather", p, gather(p, given, bytes), gathered);

    // small integers: their sums are the same in any order
    vector<float> corrected((long)p.ranks * p.world * words), sums((long)p.ranks * words, 0.0f);
    for (size_t at = 0; at < corrected.size(); at++) corrected[at] = (float)(noise((unsigned)at) % 1000);
    for (int r = 0; r < p.ranks; r++)
        for (int m = 0; m < p.world; m++)
            for (int w = 0; w < words; w++) {
                const long sender = (long)(r / p.world * p.world + m);
                sums[(long)r * words + w] += corrected[(sender * p.world + r % p.world) * words + w];
            }
    OfSeats<float> summands(p.seats());
    for (int seat = 0; seat < p.seats(); seat++) summands[seat] = part(p, seat, corrected);
    same("reduce-scatter", p, reduce(p, summands, words), sums);
}

// What a device derives for its ranks by themselves: its queries, gathered and replicated, and who writes which token.
static void derived(const Session &p) {
    const Session one{1, p.ranks, p.world};
    const int own = 2, rows = 3, tokens = 30;
    const Shape s = one.shape(0, own);
    vector<u16> query((long)rows * p.ranks * own * s.key_dim);
    for (size_t at = 0; at < query.size(); at++) query[at] = (u16)noise((unsigned)at);
    const long each = (long)rows * own * s.key_dim, wide = (long)rows * s.width * s.key_dim;
    vector<u16> selected(p.ranks * each), arranged(p.ranks * wide), replicated(p.ranks * wide);
    launch(p.ranks * each, 1, [&] { select_own_heads(s, query.data(), rows, selected.data()); });
    launch(p.ranks * wide, 1, [&] { gather_heads(s, selected.data(), 0, rows, arranged.data()); });
    launch(p.ranks * wide, 1, [&] { select_group_heads(s, query.data(), rows, replicated.data()); });
    const Batch batch{1, rows, 8, 1};
    const vector<i32> table{3, 1, 0, 2, 7, 6, 5, 4}, requests(tokens, 0);
    vector<i64> positions(tokens), slots((long)p.ranks * tokens);
    for (int at = 0; at < tokens; at++) positions[at] = at;
    vector<i32> winners((long)p.ranks * s.blocks * s.block, -1);
    i32 error = 0;
    auto write = [&](const Shape &shape, vector<i64> &to, vector<i32> &best) {
        launch((long)shape.ranks * tokens, 1, [&] {
            write_slots(shape, &batch, table.data(), positions.data(), requests.data(), tokens, to.data(), best.data(), &error);
        });
    };
    write(s, slots, winners);
    OfSeats<u8> mine(p.seats());
    OfSeats<u16> seen(p.seats()), copies(p.seats());
    OfSeats<i64> places(p.seats());
    for (int seat = 0; seat < p.seats(); seat++) {
        const Shape d = p.shape(seat, own);
        vector<u16> heads(d.ranks * each);
        launch(d.ranks * each, 1, [&] { select_own_heads(d, query.data(), rows, heads.data()); });
        const u8 *bytes = (const u8 *)heads.data();
        mine[seat].assign(bytes, bytes + 2 * heads.size());
        copies[seat].resize(d.ranks * wide);
        launch(d.ranks * wide, 1, [&] { select_group_heads(d, query.data(), rows, copies[seat].data()); });
        places[seat].resize((long)d.ranks * tokens);
        vector<i32> best((long)d.ranks * s.blocks * s.block, -1);
        write(d, places[seat], best);
    }
    const OfSeats<u8> brought = gather(p, mine, (int)(2 * each));
    for (int seat = 0; seat < p.seats(); seat++) {
        const Shape d = p.shape(seat, own);
        seen[seat].resize(d.ranks * wide);
        launch(d.ranks * wide, 1,
               [&] { gather_heads(d, (const u16 *)brought[seat].data(), 1, rows, seen[seat].data()); });
    }
    same("query", p, seen, arranged);
    same("replicated query", p, copies, replicated);
    same("slots", p, places, slots);
    if (error) failures++, printf("a block was out of range\n");
}

int main() {
    int tried = 0;
    for (int devices = 1; devices <= 5; devices++)
        for (int ranks = 1; ranks <= 9; ranks++)
            for (int world = 1; world <= ranks; world++)
                if (ranks % world == 0) {
                    moved({devices, ranks, world});
                    derived({devices, ranks, world});
                    tried++;
                }
    printf("%d sessions, %d failures\n", tried, failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
