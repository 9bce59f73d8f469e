// Codebooks of the built-in formats for N(0,1) coordinates, ascending: Weft's own in full, of the others the positive half.
#pragma once

#include <cstdint>

namespace weft {

// Weft's own tables lie on the half-integer grid, level = (n + 1/2) * step with n in -128..127, so that a code is an int8 and
// attention may run in integers. For 2 to 5 bits n and step minimise the squared error over all symmetric subsets of the grid. At 6
// bits the optimum over all subsets is 0.9 % better than that and not symmetric: a gap of 1 or 3 steps around 0 does not fit gaps of
// 2. 7 and 8 bits take 2^bits neighbouring n. cases/golden/weft_tables.json says how they were solved.
inline constexpr int8_t kGrid2[] = {-119, -36, 35, 118};
inline constexpr int8_t kGrid3[] = {-110, -69, -39, -13, 12, 38, 68, 109};
inline constexpr int8_t kGrid4[] = {-115, -87, -68, -53, -40, -28, -17, -6, 5, 16, 27, 39, 52, 67, 86, 114};
inline constexpr int8_t kGrid5[] = {-123, -102, -88, -77, -68, -60, -53, -46, -40, -34, -28, -23, -18, -13, -8,  -3,
                                    2,    7,    12,  17,  22,  27,  33,  39,  45,  52,  59,  67,  76,  87,  101, 122};
inline constexpr int8_t kGrid6[] = {-106, -92, -83, -76, -70, -65, -61, -57, -53, -50, -47, -44, -41, -38, -35, -33,
                                    -31,  -29, -27, -25, -23, -21, -19, -17, -15, -13, -11, -9,  -7,  -5,  -3,  -1,
                                    1,    3,   5,   7,   9,   11,  13,  15,  17,  19,  21,  23,  25,  27,  29,  31,
                                    33,   35,  38,  41,  44,  47,  50,  53,  57,  61,  65,  70,  76,  83,  92,  106};

struct GridTable {
  const int8_t* n;  // all 2^bits; null: -2^(bits-1), ..., 2^(bits-1) - 1
  float step;
};
inline constexpr GridTable kGridTables[] = {
    // by bits - 2
    {kGrid2, 0x1.a1ae66p-7f},   // 0.01274662
    {kGrid3, 0x1.41dadep-6f},   // 0.0196444672
    {kGrid4, 0x1.876826p-6f},   // 0.023889577
    {kGrid5, 0x1.b2dc28p-6f},   // 0.0265417472
    {kGrid6, 0x1.2099c4p-5f},   // 0.0352295712
    {nullptr, 0x1.d1dc28p-5f},  // 0.056867674
    {nullptr, 0x1.f802cep-6f},  // 0.0307623874
};

// AURA's published tables are for unit vectors of 128 coordinates; sqrt(128) brings them to N(0,1). The 4-bit one is twice as lossy
// as it could be (means of equiprobable cells), but other levels would be another format.
inline constexpr float kAura2At128[] = {0.039994f, 0.133462f};
inline constexpr float kAura3At128[] = {0.02146f, 0.065717f, 0.117832f, 0.190685f};
inline constexpr float kAura4At128[] = {0.006938f, 0.020989f, 0.035597f, 0.051262f, 0.068756f, 0.089527f, 0.117195f, 0.173926f};

// TQ: the 4-bit table is the exact optimum for N(0,1), the byte-per-code ones ("HB") are as published with codec version 1.
inline constexpr float kTq4[] = {0.128395f, 0.3880483f, 0.6567591f, 0.9423405f, 1.2562312f, 1.6180464f, 2.0690172f, 2.7325896f};
inline constexpr float kTqHb5[] = {0.0658849f, 0.1980377f, 0.331355f,  0.4666676f, 0.6048936f, 0.7470884f, 0.8945114f, 1.0487242f,
                                   1.211741f,  1.3862739f, 1.5761599f, 1.7871646f, 2.0286608f, 2.3176743f, 2.6910589f, 3.260679f};
inline constexpr float kTqHb6[] = {0.0311537f, 0.0935225f, 0.1560761f, 0.2189392f, 0.2822386f, 0.3461048f, 0.4106724f, 0.4760822f,
                                   0.5424819f, 0.6100285f, 0.6788902f, 0.7492492f, 0.8213046f, 0.8952766f, 0.9714118f, 1.0499889f,
                                   1.1313277f, 1.2157998f, 1.3038428f, 1.3959804f, 1.4928497f, 1.5952401f, 1.7041502f, 1.8208742f,
                                   1.9471373f, 2.0853192f, 2.2388464f, 2.4129324f, 2.6161277f, 2.8640626f, 3.1907215f, 3.6996161f};
inline constexpr float kTqHb8[] = {
    0.0135717f, 0.0407151f, 0.0678584f, 0.0950019f, 0.1221453f, 0.1492888f, 0.1764324f, 0.2035761f, 0.2307198f, 0.2578636f,
    0.2850076f, 0.3121517f, 0.339296f,  0.3664405f, 0.3935852f, 0.4207301f, 0.4478753f, 0.4750208f, 0.5021667f, 0.5293129f,
    0.5564596f, 0.5836067f, 0.6107544f, 0.6379027f, 0.6650517f, 0.6922014f, 0.719352f,  0.7465035f, 0.7736561f, 0.8008098f,
    0.8279648f, 0.8551212f, 0.8822793f, 0.909439f,  0.9366008f, 0.9637647f, 0.990931f,  1.0180999f, 1.0452718f, 1.0724469f,
    1.0996255f, 1.1268081f, 1.1539951f, 1.1811868f, 1.2083838f, 1.2355865f, 1.2627956f, 1.2900118f, 1.3172356f, 1.3444678f,
    1.3717093f, 1.398961f,  1.4262237f, 1.4534986f, 1.4807869f, 1.5080897f, 1.5354084f, 1.5627445f, 1.5900996f, 1.6174755f,
    1.6448739f, 1.672297f,  1.6997469f, 1.7272261f, 1.7547372f, 1.7822828f, 1.8098662f, 1.8374904f, 1.8651592f, 1.8928763f,
    1.9206458f, 1.9484722f, 1.9763603f, 2.0043154f, 2.032343f,  2.0604493f, 2.0886408f, 2.1169245f, 2.1453081f, 2.1737998f,
    2.2024086f, 2.231144f,  2.2600165f, 2.2890372f, 2.3182184f, 2.3475732f, 2.3771157f, 2.4068614f, 2.436827f,  2.4670306f,
    2.4974918f, 2.5282321f, 2.5592748f, 2.5906452f, 2.622371f,  2.6544825f, 2.6870129f, 2.7199985f, 2.7534795f, 2.7874999f,
    2.8221086f, 2.8573596f, 2.8933131f, 2.9300362f, 2.967604f,  3.0061011f, 3.0456229f, 3.086278f,  3.1281899f, 3.1715011f,
    3.2163758f, 3.2630056f, 3.3116156f, 3.3624729f, 3.4158977f, 3.4722785f, 3.5320936f, 3.5959415f, 3.6645851f, 3.7390194f,
    3.820578f,  3.9111092f, 4.0132856f, 4.1311907f, 4.2715508f, 4.4467193f, 4.6836997f, 5.0652659f};

// TQ's signs, the same for every layer and head: bit j % 32 of word j / 32 set means -1. Head size 256 uses the first 8 words.
inline constexpr uint32_t kTqSigns[] = {0xf4913ba7u, 0x0e58c26du, 0xd6247fb3u, 0x1cea4589u, 0x52d8af63u, 0x3de10b97u,
                                        0xfe19c476u, 0xdb2c854au, 0x17a84ed3u, 0x31e65b9cu, 0xf50db972u, 0xc76e8a43u,
                                        0xe1942f58u, 0x7c0a3db6u, 0x4fd861c5u, 0x851e97a3u};

}  // namespace weft
