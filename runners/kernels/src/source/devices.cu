// Exchanges of a group whose members are on several devices: what is laid out before a collective of the devices, and what is taken
// apart behind it. Member m of the group is on its device (m + turn) % devices, there the m / devices-th of the group's members; the
// collective knows `places` of them on each device, of which the last is nobody's where a device has one member less. The members of
// this device lie at its ranks `first` to `first + count`.

struct Group {
    i32 first, count, devices, places, turn;
};

SC_DEVICE i32 device_of_member(const Group &g, i32 member) { return (member + g.turn) % g.devices; }

// Member at a place of a device; not below `world` where the place is nobody's.
SC_DEVICE i32 member_at(const Group &g, i32 device, i32 place) {
    return (device + g.devices - g.turn) % g.devices + place * g.devices;
}

// gathered [ranks, W, bytes]: for each of the device's members everything that was gathered, all [devices, places, bytes].
SC_EXPORT spread_gathered(Shape s, Group g, const u8 *all, i64 bytes, u8 *gathered) {
    const i64 index = SC_INDEX;
    if (index >= (i64)g.count * s.world * bytes) return;
    const i64 byte = index % bytes;
    const i32 member = (i32)(index / bytes % s.world), own = (i32)(index / bytes / s.world);
    const i64 from = (i64)device_of_member(g, member) * g.places + member / g.devices;
    gathered[((i64)(g.first + own) * s.world + member) * bytes + byte] = all[from * bytes + byte];
}

// bundles [devices, places of the sender, places of the receiver, words] out of sent [ranks, W, words]: one piece for each device.
SC_EXPORT bundle_words(Shape s, Group g, const u16 *sent, i64 words, u16 *bundles) {
    const i64 index = SC_INDEX;
    if (index >= (i64)g.devices * g.count * g.places * words) return;
    const i64 word = index % words;
    const i32 place = (i32)(index / words % g.places), own = (i32)(index / words / g.places % g.count);
    const i32 device = (i32)(index / words / g.places / g.count), member = member_at(g, device, place);
    if (member >= s.world) return;
    bundles[(((i64)device * g.places + own) * g.places + place) * words + word] =
        sent[((i64)(g.first + own) * s.world + member) * words + word];
}

// received [ranks, W, words] out of what the devices sent, arrived [devices, places of the sender, places of the receiver, words].
SC_EXPORT spread_arrived(Shape s, Group g, const u16 *arrived, i64 words, u16 *received) {
    const i64 index = SC_INDEX;
    if (index >= (i64)g.count * s.world * words) return;
    const i64 word = index % words;
    const i32 member = (i32)(index / words % s.world), own = (i32)(index / words / s.world);
    const i64 sender = (i64)device_of_member(g, member) * g.places + member / g.devices;
    received[((i64)(g.first + own) * s.world + member) * words + word] =
        arrived[(sender * g.places + own) * words + word];
}

// sums [devices, places, elements] out of corrected [ranks, W, elements]: what the device's members have for each receiver, added in
// member order and rounded after every addition, as the collective goes on to do.
SC_EXPORT sum_members(Shape s, Group g, const void *corrected, i64 elements, i32 half, void *sums) {
    const i64 index = SC_INDEX;
    if (index >= (i64)g.devices * g.places * elements) return;
    const i64 element = index % elements;
    const i32 place = (i32)(index / elements % g.places), device = (i32)(index / elements / g.places);
    const i32 receiver = member_at(g, device, place);
    float sum = 0.0f;
    for (i32 own = 0; own < g.count && receiver < s.world; own++) {
        const i32 sender = member_of(s, g.first + own);
#if defined(FAULT_REDUCE_SCATTER_LEAVES_OUT_A_RANK)
        if (sender == s.world - 1 && s.world > 1) continue;
#elif defined(FAULT_REDUCE_SCATTER_KEEPS_ITS_OWN)
        if (sender != receiver) continue;
#endif
        (void)sender;
        const float value = load_wire(half, corrected, ((i64)(g.first + own) * s.world + receiver) * elements + element);
        sum = own == 0 ? value : round_wire(half, sum + value);
    }
    store_wire(half, sums, index, sum);
}
