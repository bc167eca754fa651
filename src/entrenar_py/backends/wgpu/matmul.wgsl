// Tiled float32 matrix product, operands of any strides.
//
//   group 0, binding 0   a     storage, read        f32, element (i, j) at i * a_row + j * a_col
//   group 0, binding 1   b     storage, read        f32, element (i, j) at i * b_row + j * b_col
//   group 0, binding 2   c     storage, read_write  f32 [m, n], row-major
//   group 0, binding 3   dims  uniform              sizes and strides, in elements
//
// Workgroup size 16 x 16 (x: columns, y: rows); dispatch ceil(n / 16) x ceil(m / 16).
// Equals c = a @ b in numpy; each element adds its k products in order, from the first.

const TILE = 16u;

struct Dims {
    m: u32,
    k: u32,
    n: u32,
    a_row: u32,
    a_col: u32,
    b_row: u32,
    b_col: u32,
    unused: u32, // a uniform's size is a multiple of 16 bytes
}

@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
@group(0) @binding(3) var<uniform> dims: Dims;

var<workgroup> a_tile: array<array<f32, TILE>, TILE>;
var<workgroup> b_tile: array<array<f32, TILE>, TILE>;

@compute @workgroup_size(16, 16)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
) {
    let row = group.y * TILE + local.y;
    let column = group.x * TILE + local.x;
    var sum = 0.0;
    for (var start = 0u; start < dims.k; start += TILE) {
        // Beyond a ragged edge the tiles hold zeros, which add nothing.
        let a_column = start + local.x;
        let b_row = start + local.y;
        var a_value = 0.0;
        var b_value = 0.0;
        if (row < dims.m && a_column < dims.k) {
            a_value = a[row * dims.a_row + a_column * dims.a_col];
        }
        if (b_row < dims.k && column < dims.n) {
            b_value = b[b_row * dims.b_row + column * dims.b_col];
        }
        a_tile[local.y][local.x] = a_value;
        b_tile[local.y][local.x] = b_value;
        workgroupBarrier();
        for (var i = 0u; i < TILE; i++) {
            sum += a_tile[local.y][i] * b_tile[i][local.x];
        }
        workgroupBarrier();
    }
    if (row < dims.m && column < dims.n) {
        c[row * dims.n + column] = sum;
    }
}
