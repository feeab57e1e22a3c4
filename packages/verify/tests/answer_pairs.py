"""Pairs of reference and answer by mechanism: equal ones, and different ones that look alike.

A line is `reference | answer`. Most were written before the rules that judge them, those of a second to a
fourth reading when the others held.
"""

EQUAL = {
    "arguments of TeX": r"""
\frac{1}{n} | \frac1n
\frac{1}{n+1} | \frac1{n+1}
\frac{n+1}{2} | \frac{n+1}2
\frac{\pi}{4} | \frac\pi4
\frac{\pi}{4} | \tfrac\pi4
\frac{\alpha}{\beta} | \frac\alpha\beta
\frac{ab}{c} | \frac{ab}c
\frac{1}{2}x | \frac12x
\frac{13}{2} | \frac1213
\sqrt{\frac{1}{2}} | \sqrt\frac12
\sqrt{\frac{1}{2}} | \sqrt\frac{1}{2}
2\sqrt{3} | \sqrt4\sqrt3
\sqrt[3]{x} | \sqrt[3]x
\binom{n}{2} | \binom n2
\binom{n}{k} | {n \choose k}
\frac{n(n-1)}{2} | \binom n2
\frac{a}{b} | {a \over b}
\frac{1}{x^2} | \frac1{x^2}
x^{\frac12} | x^\frac12
x^{\alpha} | x^\alpha
2^{n}m | 2^nm
\frac{\sqrt{3}}{2} | \frac{\sqrt3}2
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt2}
\frac{\sin x}{2} | \frac{\sin x}2
a_{n}+a_{n+1} | a_n+a_{n+1}
\frac{1}{\frac{1}{2}+\frac13} | \frac65
""",
    "scope of functions": r"""
3\ln 2 | \ln 2 \cdot 3
3\ln 2 | \ln{2}\cdot 3
2\sin x | \sin x \cdot 2
2\sin x\cos x | \sin 2x
8 | \log_2 4 \cdot 4
1 | \sin 30^\circ \cdot 2
\frac{1}{2} | \sin 30^{\circ}
x\sin x | \sin x \cdot x
x\sin x | \sin{x}\,x
\cos x - \sin x | -\sin x+\cos x
\ln 2\ln 3 | \ln 2 \cdot \ln 3
\ln(xy) | \ln xy
\sin(x)\cos(y)+\cos(x)\sin(y) | \sin(x+y)
\log_3 x \cdot 2 | 2\log_3 x
\log_{3}{x}+1 | 1+\log_3 x
\tan x \times 5 | 5\tan x
\arctan(2) | \tan^{-1} 2
\frac{1}{\sin x} | \csc x
(\sin x)^2 | \sin^2 x
(\ln x)^2 | \ln^2 x
e^{x}\ln x | \ln x \cdot e^x
\frac{\ln 2}{3} | \ln 2/3
\sin\frac{\pi}{6} | \frac12
\cos 2x | 1-2\sin^2 x
\sinh 2x | 2\sinh x\cosh x
\exp(x+1) | e^{x+1}
5 | \sqrt{25}\cdot\cos 0
\ln(x+1) + C | C + \ln(1+x)
""",
    "looks": r"""
42 | \color{red}{42}
42 | {\color{blue} 42}
42 | \textcolor{red}{42}
42 | \underline{42}
42 | \underline{\underline{42}}
42 | \mathbf{42}
42 | \mathbf{\text{42}}
42 | \textbf{42}
42 | \text{Answer: }42
42 | \text{Answer: 42}
42 | \text{The answer is } 42
42 | The answer is 42.
42 | answer = 42
42 | \large 42
42 | \Large{42}
42 | \bf 42
42 | {\bf 42}
42 | \displaystyle 42
42 | 42。
42 | 42\text{ (exact)}
42 | \boxed{42}
42 | \left(42\right)
42 | \quad 42 \quad
42 | $42$
42 | \(42\)
42 | \[42\]
42 | $$42$$
42 | **42**
42 | ４２
42 | +42
x^2 | \mathrm{x}^2
(1,2) | \left( 1 ,\; 2 \right)
\frac{1}{2} | \displaystyle\frac{1}{2}
\text{yes} | \textbf{Yes}
\text{yes} | Yes.
""",
    "letters": r"""
abc | cab
abc | a \cdot b \cdot c
lwh | whl
xyz | zyx
xyz | x y z
2abc | 2cab
mgh | hgm
ab | ba
\pi r^2 h | h\pi r^2
kxy | xyk
abcd | dcba
x^2yz | zyx^2
a+bc | cb+a
""",
    "words": r"""
\text{Monday} | Monday
\text{no solution} | No solution
New York | new york
\text{dog} | dog
\text{Alice and Bob} | Bob and Alice
B | \text{B}
(B) | B
\text{(C)} | (C)
\text{odd} | odd
north | \text{North}
\text{right triangle} | right triangle
\text{A, C} | A, C
ABD | ABD
""",
    "sets": r"""
\{1,2,3\} | \{3,2,1\}
\{1,2,3\} | \{1,2\}\cup\{3\}
\{1,2,3\} | \{1,2,2,3\}
\{1,2\} | \{x \mid x=1 \text{ or } x=2\}
(-\infty,\infty) | \mathbb R
\mathbb{R} | \mathbb R
\mathbb{R} | (-\infty, +\infty)
x\neq0 | (-\infty,0)\cup(0,\infty)
\mathbb{R}\setminus\{0\} | x \ne 0
\mathbb{R}-\{1\} | (-\infty,1)\cup(1,\infty)
[-1,1] | |x|\leq1
(-1,1) | |x|<1
(-\infty,-2)\cup(2,\infty) | |x|>2
(1,5) | |x-3|<2
\{x\mid x>2\} | (2,\infty)
\{x : x \ge 2\} | [2,\infty)
\{x \in \mathbb{R} : 0 < x \le 1\} | (0,1]
(0,1) | ]0,1[
[0,1) | [0,1[
(0,1] | ]0;1]
[0,3] | [0,1]\cup[1,3]
[0,3] | [0,2]\cup(1,3]
[1,2] | [0,2]\cap[1,3]
\emptyset | \{\}
\emptyset | \{1\}\cap\{2\}
x>3 | 3<x
x>3 | (3,\infty)
x \in (3,\infty) | x>3
-2<x<2 | x^2<4
x\le -1 \text{ or } x\ge 1 | (-\infty,-1]\cup[1,\infty)
x > 1, x \ne 2 | (1,2)\cup(2,\infty)
(-\infty,\sqrt2) | x<\sqrt{2}
2x+1>5 | x>2
\{\frac12, 2\} | \{0.5, 2\}
\{(1,2),(3,4)\} | \{(3,4),(1,2)\}
\{a,b\} | \{b,a\}
(0,\infty) | \{x \mid x > 0\}
[\frac13,\infty) | x \geq \frac{1}{3}
""",
    "tuples and matrices": r"""
(1,2) | \langle1,2\rangle
\langle 1,2 \rangle | \langle1,2\rangle
\langle 1,2\rangle | (1,2)
(x,y)=(1,2) | (1,2)
(x,y)=(1,2) | x=1, y=2
(\frac12,3) | (0.5, 3)
(1,2,3) | 1,2,3
\begin{pmatrix}1\\2\end{pmatrix} | \begin{bmatrix} 1 \\ 2 \end{bmatrix}
\begin{pmatrix}\frac12&0\\0&1\end{pmatrix} | \frac12\begin{pmatrix}1&0\\0&2\end{pmatrix}
\begin{pmatrix}2&4\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix}+\begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \left[\begin{array}{cc}1&2\\3&4\end{array}\right]
-\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}-1\\-2\end{pmatrix}
\begin{pmatrix}x+1&0\\0&1\end{pmatrix} | \begin{pmatrix}1+x&0\\0&1\end{pmatrix}
""",
    "systems and cases": r"""
x=1,y=2 | \begin{cases}x=1\\y=2\end{cases}
x=1,y=2 | \left\{\begin{array}{l}x=1\\y=2\end{array}\right.
\begin{cases}x=1\\y=2\end{cases} | y=2, x=1
\begin{cases}x=1\\y=2\end{cases} | (x,y)=(1,2)
\begin{cases}x=1,\\y=2.\end{cases} | x=1 \text{ and } y=2
\begin{aligned}x&=1\\y&=2\end{aligned} | x=1,\ y=2
f(x)=\begin{cases}x^2&x>0\\0&x\le0\end{cases} | \begin{cases}0&\text{if }x\le0\\x^2&\text{if }x>0\end{cases}
\begin{cases}1 & x>0\\0 & x\le 0\end{cases} | \begin{cases}1 & x>0\\0 & \text{otherwise}\end{cases}
\begin{cases}x,&x\ge0\\-x,&x<0\end{cases} | \begin{cases}x&\text{if }0\le x\\-x&\text{else}\end{cases}
\begin{cases}1&\text{even}\\0&\text{else}\end{cases} | \begin{cases}0&\text{else}\\1&\text{even}\end{cases}
""",
    "chains": r"""
0.5 | \frac12 = 0.5
\frac12 | \frac12 \approx 0.5
\frac{1}{3} | \frac13 \approx 0.333
5 | x = 2+3 = 5
x=5 | x = 10/2 = 5
x=5 | 5
5 | 2+3=5
\sqrt{2} | \sqrt2 \approx 1.414
2\pi | 2\pi \approx 6.28
f(x)=x+1 | x+1
y=2x+1 | y-2x=1
3x+4y=7 | 6x+8y=14
x=y | y=x
S = \pi r^2 | \pi r^2
P(A)=\frac14 | 0.25
\text{Area} = 6 | 6
|AB| = 5 | 5
x_1=1, x_2=2 | x_1 = 1,\; x_2 = 2
120 | 5!=120
\frac{AB}{CD}=\frac12 | \frac{1}{2}
x = \frac{1 \pm \sqrt5}{2} | \frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}
x=\pm2 | x=2 \text{ or } x=-2
x^2+y^2=1 | y^2+x^2=1
""",
    "units": r"""
60\text{ km/h} | 60\text{ kmph}
60\text{ km/h} | 60 km/h
5\text{ m/s} | 5\ \text{m}\cdot\text{s}^{-1}
5\text{ m/s} | 5 \frac{\text{m}}{\text{s}}
5\text{ m/s} | 5\,\mathrm{m\,s^{-1}}
45^\circ\text{C} | 45\,^{\circ}\mathrm{C}
45^\circ\text{C} | 45°C
8\text{ h} | 8 h
8\text{ hours} | 8 h
8 | 8 h
8 | 8 hours
8\text{ h} | 480 minutes
100\text{ cm} | 1\text{ m}
1\text{ m}^2 | 10000\text{ cm}^2
5\text{ cm}^3 | 5 cubic centimeters
5\text{ cm} | 5cm
12 | 12\text{ square units}
20\pi | 20\pi\text{ cm}^2
90^\circ | 90
90^\circ | 90\text{ degrees}
\frac{\pi}{3} | 60^\circ
\$5 | 5 dollars
5 \text{ dollars} | \$5.00
3 | 3\text{ apples}
3\text{ apples} | 3 apple
2\text{ million} | 2000000
60 | 60\text{ mph}
9.8\text{ m/s}^2 | 9.8 m/s^2
3x\text{ cm} | 3x
x=5\text{ cm} | 5 cm
(3\text{ cm}, 4\text{ cm}) | (3,4)
5\text{ J} | 5\,\mathrm{J}
""",
    "percent and numbers": r"""
50\% | 50
50 | 50\%
50\% | 50\text{ percent}
12.5\% | 12.5
1000 | 1{,}000
1000 | 1,000
1234567 | 1,234,567
1000000 | 1\,000\,000
1000000 | 10^6
0.001 | 10^{-3}
0.001 | 1e-3
1.5\times10^{3} | 1500
3{,}5 | 3.5
\frac13 | 0.\dot3
\frac13 | 0.\overline{3}
\frac13 | 0.\bar{3}
\frac13 | 0.(3)
\frac{1}{6} | 0.1\overline{6}
\frac{1}{7} | 0.\overline{142857}
\frac{41}{333} | 0.\dot12\dot3
\frac13 | 0.333\ldots
2.5 | 2\frac12
-2.5 | -2\frac12
\frac{5}{2} | 2 1/2
-\frac{1}{2} | \frac{-1}{2}
-\frac{1}{2} | \frac{1}{-2}
0.75 | \frac{3}{4}
3.14 | 3.14159
3.142 | \pi
\frac{\sqrt3}{2} | 0.5\sqrt3
\frac{1}{3} | 0.3333333333
007 | 7
1011_2 | 1011_{2}
2^{10} | 1024
\lg 1000 | 3
\log_{10} 1000 | 3
\lg 2 + \lg 5 | 1
7 \bmod 3 | 1
3 \pmod 7 | 10 \pmod{7}
x \equiv 3 \pmod 7 | x\equiv 3\ (\mathrm{mod}\ 7)
x \equiv 3 \pmod 7 | 3 \pmod{7}
1:2 | 1 : 2
6 | 3!
\binom{5}{2} | 10
\gcd(12,18) | 6
\max\{2,5\} | 5
\lfloor 3.7 \rfloor | 3
|-5| | 5
i | \sqrt{-1}
(1+i)(1-i) | 2
e^{i\pi} | -1
\infty | +\infty
-\infty | - \infty
""",
    "algebra": r"""
x^2-1 | (x-1)(x+1)
(a+b)^2 | a^2+2ab+b^2
\frac{x^2-1}{x-1} | x+1
\frac{1}{x}+\frac{1}{y} | \frac{x+y}{xy}
\sqrt{8} | 2\sqrt2
\sqrt{6} | \sqrt2\cdot\sqrt3
\frac{1}{1+\sqrt2} | \sqrt2-1
\sqrt{3+2\sqrt2} | 1+\sqrt2
\sqrt[3]{8} | 2
\sqrt[3]{2} | 2^{1/3}
x^{-1} | \frac1x
\frac{x}{y} | xy^{-1}
2^{n+1} | 2\cdot2^n
x^n\cdot x^m | x^{n+m}
(x^a)^2 | x^{2a}
e^{2x} | (e^x)^2
\sum_{k=1}^{n} k | \frac{n(n+1)}{2}
\sum_{i=1}^{10} i^2 | 385
\prod_{k=1}^{5} k | 120
\int_0^1 x^2 dx | \frac13
\lim_{x\to0} \frac{\sin x}{x} | 1
\sum_{k=0}^{\infty} \frac{1}{2^k} | 2
n! | n\cdot(n-1)!
(-1)^n | \cos n\pi
(-1)^{n+1} | -(-1)^n
(-1)^{n-1} | (-1)^{n+1}
\sqrt{4x^3} | 2x\sqrt x
\sqrt{x^2} | |x|
f(x)+f(y) | f(y)+f(x)
\frac{x_1+x_2}{2} | \frac{x_2+x_1}{2}
a^2+b^2 | b^{2}+a^{2}
\frac{a}{b}\cdot c | \frac{ac}{b}
-x^2 | -(x^2)
(2x)^3 | 8x^3
\pi | \frac{2\pi}{2}
\cos^2 x+\sin^2 x | 1
\tan 60^\circ | \sqrt3
\ln 8 | 3\ln 2
\log_2 3 | \frac{\ln 3}{\ln 2}
\log 6 | \log 2+\log 3
""",
    "plain text": r"""
\sin x | sin x
\sin x | sin(x)
2\sin x | 2sin x
2\sin x | 2*sin(x)
\ln 2 | ln 2
x-y | -y+x
x-y | x - y
f'(x)=2x | 2x
f' | f'
\sqrt{3} | sqrt(3)
2\sqrt{3} | 2sqrt3
\frac{\pi}{2} | pi/2
\infty | infinity
\infty | inf
\frac{x+1}{2} | (x+1)/2
x^{n+1} | x^(n+1)
e^{2x} | e^(2x)
\sqrt{x+1} | √(x+1)
\pi r^2 | πr²
x^2 | x²
\frac{1}{2} | ½
3\times4 | 12
x \le 3 | x <= 3
x \ne 3 | x != 3
\alpha+\beta | α+β
ab-cd | -cd+ab
a-b | -(b-a)
\sin 2x | sin(2x)
x = 3 | x=3
10 \text{ or } 12 | 12 or 10
\text{right-angled} | right-angled
""",
    "numbers and structures": r"""
42 | 42.
42 | 42.0
42 | \text{42}
1000 | 1\,000
1000 | \$1000
-3 | −3
1/2 | 0.5
\frac{1}{2} | \dfrac12
\frac{1}{2} | 2/4
\frac{-1}{2} | -\frac{1}{2}
\frac{7}{3} | 2\frac13
0.\overline{3} | 1/3
3.14 | 3.1416
\sqrt{2} | \sqrt2
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
2\sqrt{3} | \sqrt{12}
\frac{\pi}{4} | 0.25\pi
5! | 120
\log_2 8 | 3
\sin^2 x+\cos^2 x | 1
10^{-20} | 1\times 10^{-20}
\emptyset | \varnothing
(1,2) | \left(1, 2\right)
\{1,2,3\} | \{3,1,2\}
\{1,2\} | 2, 1
\pm 3 | 3,-3
[0,1) | \left[0,1\right)
(-\infty,3] | x \le 3
x \in (1,2) | 1<x<2
(-\infty, 2) \cup (3, \infty) | (3,\infty)\cup(-\infty,2)
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
5 | x=5
y=2x+1 | 2x-y+1=0
5 \text{ cm} | 5\,\mathrm{cm}
5 \text{ cm} | 5
204_5 | 204_{5}
\text{(A)} | A
\text{Monday} | monday
3000 | 3\text{ thousand}
3000000 \text{ dollars} | 3 million
36 | 3 dozen eggs
60 \text{ mph} | 60 \text{ miles}/\text{hour}
5\text{ packs of gum} | 5
5\text{ packs of gum} | 5\text{ packs of gum}
5\text{ cm}^2 | 5 square centimeters
5 | \text{5 apples}
3_{10} | 3
(1,2,3) | (1, 2, and 3)
\text{Monday and Tuesday} | Tuesday and Monday
8 | 2³
2.5 | 2½
204_5 | 204₅
1e-05 | 0.00001
1e308 | 10^{308}
x = 1 or x = 2 | 2, 1
x = 1 or x = 2 | x=2, x=1
x = 1 or x = 2 | \{1,2\}
x = 1, 2 | 2, 1
x=1, y=2 | y=2, x=1
1,2,3,... | 1,2,3,\ldots
12 | 3(4)
12 | (3)(4)
1 | \sin^2(1)+\cos^2(1)
2.5x | \frac{5x}{2}
2^{2025} | 2\cdot 2^{2024}
\binom{100}{50} | \frac{100!}{50!50!}
""",
    "notation": r"""
2.5 | 2 1/2
-1.5 | -1 1/2
5/2 | 2\ 1/2
2.5 \text{ cups} | 2 1/2 cups
2.5 \text{ cups} | 2\frac{1}{2} cups
1234.5 | 1 234.5
12 | 12cm
60 \text{ mph} | 60mi/h
5\text{ cm}^2 | 5cm^2
3 | f(2) = 3
f(2) = 3 | 3
0.3 | P(X=2)=0.3
5 | d((0,0),(3,4)) = 5
2,1,-1,-2 | \pm 1, \pm 2
\{-2,-1,1,2\} | x = \pm 1, \pm 2
1/2 | \cos 60^\circ
\sin 40^\circ | \cos(50^\circ)
30 | \arcsin(1/2) = 30^\circ
3 | \log_2 8
x<1 \text{ or } x>3 | (-\infty,1)\cup(3,\infty)
x<1 or x>3 | x>3, x<1
x>1 and x<3 | 1<x<3
(1,3) | x<3 \text{ and } x>1
2024-01-02 | 2024-1-2
3-2 | 3–2
1.2.3 | 1.2.3
3{,}14 | 3.14
12000 | 12{,}000
2^T | 2^{T}
10^-3 | 0.001
x^2+2x+1 | x**2+2*x+1
2\sqrt{3} | 2*sqrt(3)
\sqrt{2} | 2^(1/2)
2\pi | 2*pi
\ln 2 | ln(2)
{5 \choose 2} | 10
10 | 5 \choose 2
10 | \binom52
1080 | 1,080 dollars
1080 | x = 1,080
1080 | \text{Total} = 1,080 dollars
1000\pi | 1,000\pi
2, 1080 | 1,080 and 2
(1,080) | (1, 80)
\frac{1}{3} | 0.\bar3
1080 | \$1,080.00 dollars
1080 \text{ km} | 1,080 km
42 | `42`
42 | \bm{42}
42 | US$42
A | A)
no | No
5 m/s | 5 \text{ m/s}
9.8 m/s^2 | 9.8
5 \times 10^3 \text{ m} | 5000
5\text{ m}/\text{s} | 5 m/s
f^{-1}(x)=x-1 | x-1
\frac{x}{2} | \frac x2
\frac{n}{2} | \frac n{2}
\frac{n}{2} | \frac{n}2
\frac{\alpha}{2} | \frac\alpha2
\frac{a}{b} | \frac ab
\frac{3\pi}{4} | \frac{3\pi}4
\frac{1}{\sqrt{2}} | \sqrt\frac12
\sqrt{x} | x^\frac12
\frac{1}{2} | \frac12
2\frac12 | 2.5
\sqrt{\pi} | \sqrt\pi
42 | \color{red}42
42 | \textcolor{blue}{42}
\frac12 | \frac24 = \frac12 \approx 0.5
\frac13 | 0.\dot{3}
\frac{41}{333} | 0.\dot{1}2\dot{3}
\frac{7}{30} | 0.2\dot3
""",
    "scope, both ways": r"""
\ln 8 | \ln 2 \cdot 3
4x | \ln e \cdot 4x
2\sin x | \sin{x} \cdot 2
8 | \log_{2}4\times 4
1 | \sin{30^\circ} \cdot 2
1 | 2\sin 30^\circ
x\sin x | \sin{x}\cdot x
x\sin x | \sin{x}x
\ln 2\ln 3 | \ln 3\ln 2
\ln 2\ln 3 | (\ln 2)(\ln 3)
\sin 2x | 2\sin x\cos x
\sin(2x) | \sin 2x
\sin 2x | 2 \sin x \cdot \cos x
\sin^2 x | (\sin x)^2
\sin^2 x | \sin x \cdot \sin x
\sin^2 x | \sin^{2}(x)
\sin^2 2x | \sin(2x)^2
\cos^2 x \cdot x | x\cos^2 x
\sin x^2 | \sin(x^2)
\sin{x^2} | \sin(x^2)
\sin^{-1} x | \arcsin x
\tan^{-1} x \cdot 2 | 2\arctan(x)
\arctan x \cdot 2 | 2\arctan(x)
\arcsin \frac12 \cdot 6 | \pi
\exp x \cdot x | xe^x
\exp{x}\cdot x | xe^x
\exp(2x) | \exp 2x
\sinh x \cdot 2 | e^x - e^{-x}
\cosh x + \sinh x | e^x
\coth x | \frac{\cosh x}{\sinh x}
\operatorname{csch} x | \frac{1}{\sinh x}
\sinh^{-1} x | \operatorname{arsinh} x
\operatorname{arcsinh} x \cdot 3 | 3\operatorname{arsinh}(x)
\operatorname{sech}^2 x | \frac{1}{\cosh^2 x}
\log_{10} 100 \cdot 3 | 6
\lg 100 \cdot 3 | 6
\log_28 | 3
\log_2^2 8 | 9
\log^{2}_2 8 | 9
\log_{10}x | \log_10 x
\log_2 x^3 | \log_2(x^3)
\ln x^2 | \ln(x^2)
\ln x + 1 | 1 + \ln(x)
\ln x - 1 | -1 + \ln x
\frac{\ln x}{2} | \ln x / 2
\frac{\ln 6}{2} | \ln 6 / 2
\frac{\sin x}{x} | \sin x / x
\tan x | \sin x / \cos x
\ln 2 + \ln 3 | \ln 6
\ln\frac{a}{b} \cdot 2 | 2\ln\frac{a}{b}
\ln\sqrt{2} \cdot 2 | \ln 2
\ln\ln x | \ln(\ln x)
\ln \sin x \cdot 2 | 2\ln(\sin x)
\sin x(1+\cos x) | (1+\cos x)\sin x
\sin x(1+\cos x) | \sin x + \sin x\cos x
\cos 2(x+1) | \cos(2x+2)
\ln(2)(3) | 3\ln 2
\ln(x+1)\cdot x | x\ln(x+1)
\ln|x| \cdot 2 | 2\ln|x|
\ln|x+1| + C | C + \ln|1+x|
\frac{1}{\ln 2 \cdot 3} | \frac{1}{3\ln 2}
e^{\ln 2 \cdot 3} | 8
2^{\log_2 3 \cdot 2} | 9
\sqrt{\sin x \cdot 4} | 2\sqrt{\sin x}
\cos \pi/3 | \frac12
\sin\frac{\pi}{6} \cdot 4 | 2
\cos\theta \cdot r | r\cos\theta
\cos\theta+i\sin\theta | e^{i\theta}
\cos(-x) | \cos -x
\sin -x | -\sin x
g\sin\theta | \sin\theta \cdot g
f\cos x | \cos x \cdot f
5\sin 3t \cdot 2 | 10\sin(3t)
\tan 45^\circ \cdot 7 | 7
\int \sin x \, dx | \int \sin(x) dx
\sec x \cdot \cos x | 1
\csc x \sin x | 1
\cot x \cdot \tan x | 1
x^n x | x^{n+1}
\frac{1}{x-1}-\frac{1}{x+1} | \frac{2}{x^2-1}
\frac{x}{1+\sqrt2} | (\sqrt2-1)x
\frac{x^{100}-1}{x-1} | \sum_{k=0}^{99}x^k
\frac{a(1-r^n)}{1-r} | \frac{a(r^n-1)}{r-1}
""",
    "second reading": r"""
\dfrac{7}{2} | 3.5
\frac{3}{4} | \frac{3}{4}\text{ or } 0.75
-\frac{3}{4} | -0.75
x=\frac{-b\pm\sqrt{b^2-4ac}}{2a} | \frac{-b\pm\sqrt{b^2-4ac}}{2a}
2+\sqrt{3} | \sqrt{3}+2
\frac{2\sqrt{3}+3}{3} | 1+\frac{2}{\sqrt3}
\frac{\sqrt{6}-\sqrt{2}}{4} | \sin 15^\circ
\sqrt[4]{16} | 2
\sqrt[3]{54} | 3\sqrt[3]{2}
e^{-1} | \frac{1}{e}
10\% | 10 \%
\$12.50 | 12.5
\$1,234.50 | 1234.5
12{,}345 | 12345
1.2 \times 10^{5} | 120000
1.2e5 | 120000
5:30 | 5:30
x^3 - 3x + 2 | (x-1)^2(x+2)
\frac{x+2}{x^2-4} | \frac{1}{x-2}
(x-2)(x+2) | x^2-4
3(x+1) | 3x+3
\left(\frac{1}{2}\right)^n | 2^{-n}
\left(\frac{1}{2}\right)^n | \frac{1}{2^n}
n^2+n | n(n+1)
\frac{n!}{(n-2)!} | n(n-1)
\binom{n}{k} | \frac{n!}{k!(n-k)!}
\log_a b | \frac{\ln b}{\ln a}
\ln\sqrt{x} | \frac12\ln x
\sin^2 x | \frac{1-\cos 2x}{2}
\tan x | \frac{\sin x}{\cos x}
\cos\left(x-\frac{\pi}{2}\right) | \sin x
\frac{1}{2}\sin 2x | \sin x\cos x
x\in[0,1] | 0\le x\le 1
(-\infty,1)\cup(1,\infty) | x\neq 1
(2,3) | 2<x<3
k\le 4 | (-\infty,4]
[2,\infty) | x\geq2
(1, \infty) | (1,+\infty)
x \in \mathbb{R} | \mathbb{R}
\text{all real numbers} | All real numbers
\{0,1\} | 0,1
\{0,1\} | \{1, 0\}
\{-1\}\cup[2,3] | [2,3]\cup\{-1\}
y = 3x - 5 | y=-5+3x
y = 3x - 5 | 3x-5
y = 3x-5 | 3x - y = 5
y = 3x-5 | 3x-y-5=0
\frac{x^2}{4}+\frac{y^2}{9}=1 | 9x^2+4y^2=36
(x-1)^2+(y+2)^2=9 | (x - 1)^2 + (y + 2)^2 = 9
(x-1)^2+(y+2)^2=9 | x^2+y^2-2x+4y-4=0
f(x)=2x+3 | 2x+3
a_n = 2n+1 | 2n+1
a_n=2n+1 | a_{n}=1+2n
\text{(D)} | D
\text{B} | (B)
B | \textbf{(B)}
B | \text{B}.
\text{True} | true
\text{Tuesday} | \text{tuesday}
\text{3 hours} | 3 hours
36\text{ square meters} | 36\text{ m}^2
36\text{ m}^2 | 36 m^2
36\text{ m}^2 | 36
15\text{ minutes} | 15 min
15\text{ minutes} | 15
\frac{1}{2}\text{ hour} | 30\text{ minutes}
5\sqrt{2}\text{ cm} | 5\sqrt{2}
120^\circ | 120^{\circ}
120^\circ | 120°
\angle A = 60^\circ | 60^\circ
6\pi | 6\pi\text{ square inches}
3 + 4i | 4i+3
\frac{1+i}{2} | \frac12+\frac{i}{2}
i | \frac{-1}{i}
(2,-3) | (2, -3)
(2,-3) | \left(2,-3\right)
(2,-3) | x=2, y=-3
\left(\frac{1}{2},\frac{3}{4}\right) | (0.5,0.75)
(1,2),(3,4) | (3,4),(1,2)
(1,2),(3,4) | (1,2) \text{ and } (3,4)
(1,2) \text{ and } (3,4) | \{(1,2),(3,4)\}
x=1\text{ and }x=3 | 1, 3
x=1,3 | x=1\text{ or }x=3
1\text{ and }3 | 3, 1
\begin{bmatrix}1\\0\end{bmatrix} | \begin{pmatrix}1\\0\end{pmatrix}
\vec{v} = (1,2) | (1,2)
2^{\frac{1}{3}} | \sqrt[3]{2}
4^{1/2} | 2
\frac{\pi^2}{6} | \frac{1}{6}\pi^2
\pi - 2 | -2+\pi
1-\ln 2 | \ln\frac{e}{2}
\arctan 1 | \frac{\pi}{4}
\arccos 0 | \frac{\pi}{2}
2\arctan\frac13 | \arctan\frac34
\frac{\ln 9}{\ln 3} | 2
\log_4 8 | 1.5
100! | 100\cdot 99!
\sum_{n=1}^{\infty}\frac{1}{n^2} | \frac{\pi^2}{6}
\int_0^\pi \sin x\,dx | 2
\lfloor \pi \rfloor | 3
\left\lfloor\frac{n}{2}\right\rfloor | \lfloor n/2\rfloor
|x-1| | |1-x|
\max(a,b) | \max(b,a)
\overline{AB} | \overline{AB}
\triangle ABC | \triangle ABC
\text{Option C} | option c
(-\infty,\infty) | all real numbers
15 \mathrm{~km} / \mathrm{h} | 15 km/h
25 \mathrm{~cm}^{2} | 25
1 \frac{1}{2} | 1.5
1\dfrac12 | \frac32
x = 2 k \pi | 2k\pi
\frac{\pi}{4}+k\pi, k\in\mathbb{Z} | \frac{\pi}{4}+k\pi, k \in \mathbb Z
\frac{\pi}{6} + 2k\pi | 2\pi k+\frac{\pi}{6}
\frac{1}{3}\left(4^{n}-1\right) | \frac{4^n-1}{3}
2^{n}-1 | -1+2^n
3^{2n} | 9^n
\frac{2^{n+1}}{2} | 2^n
(-1)^n n | n(-1)^n
(-2)^n | (-1)^n 2^n
\frac{a^2-b^2}{a-b} | a+b
\sqrt{a^2 b} | |a|\sqrt b
\sqrt{50}+\sqrt{8} | 7\sqrt2
\frac{1}{\sqrt{3}-1} | \frac{\sqrt3+1}{2}
0 | 0.0
-0 | 0
3.0 | 3
.5 | \frac12
1000000 | 1 000 000
2\cdot 10^{-3} | 0.002
""",
    "third reading": r"""
\frac{5}{2}\pi | \frac{5\pi}{2}
\frac{-3\pm\sqrt{17}}{2} | -\frac32\pm\frac{\sqrt{17}}2
\left[-\frac{1}{2},\frac{1}{2}\right] | |2x|\le1
(-\infty,-3]\cup[3,\infty) | x^2\ge9
\{x|x\ne1\} | (-\infty,1)\cup(1,+\infty)
x\ge0,x\ne1 | [0,1)\cup(1,\infty)
a<b | b>a
m=-1\text{ or }m=3 | m=3,-1
\frac{n(n+1)(2n+1)}{6} | \sum_{k=1}^n k^2
1.25 \times 10^{-4} | 0.000125
3\text{ h }30\text{ min} | 3\text{ h }30\text{ min}
72\text{ km/h} | 20\text{ m/s}
1\text{ kg} | 1000\text{ g}
\cos^2\theta-\sin^2\theta | \cos2\theta
\frac{e^x+e^{-x}}{2} | \cosh x
\log_2(x)+\log_2(y) | \log_2(x)+\log_2 y
2\sqrt{x}\cdot\sqrt{x} | 2\sqrt{x}^2
-\frac{1}{x} | \frac{1}{-x}
x^{\frac{3}{2}} | x\sqrt x
\frac{3x^2}{2}+C | C+1.5x^2
\text{Yes} | yes
\cosh(50x)+\sinh(50x) | e^{50x}
e^x-e^{-x} | 2\sinh x
\sqrt{x^2+y^2} | \sqrt{y^2+x^2}
e^{e^x} | e^{(e^x)}
2^{3^x} | 2^{(3^x)}
\sin(1000x) | \sin(1000 x)\cdot1
\tan 2x | \frac{2\tan x}{1-\tan^2 x}
\ln(x^2+1) | \ln(1+x^2)
3\ln 2 + x^{100} | x^{100}+\ln 8
y=\sqrt{x} | 2y=2\sqrt x
""",
    "fourth reading": r"""
5\text{ mV} | 0.005 V
10 \text{ N} | 10\ \mathrm{kg\cdot m/s^2}
4\ \Omega | 4 ohms
4000\ \Omega | 4\ \mathrm{k\Omega}
3 W | 3 J/s
20 mL | 0.02 L
5 \text{ kg} | 5 KG
135 minutes | 2 hours and 15 minutes
5 feet 3 inches | 63 inches
90 \text{ seconds} | 1\text{ minute }30\text{ seconds}
22.5^\circ | 22^\circ30'
120^\circ | \frac{2\pi}{3} \text{ rad}
\frac{\pi}{4} \text{ rad} | 45^\circ
£15 | 15 pounds
€3.50 | 3.50 euros
75 cents | \$0.75
\$1,234.50 | 1234.50
\$5 | x = 5
3:30 PM | 15:30
12:00 AM | 0:00
9:05 a.m. | 9{:}05\text{ AM}
July 4, 1776 | 4 July 1776
May 1 | 1st of May
1:2 | 1 to 2
1:2:3 | 1{:}2{:}3
twelve | 12
21 | twenty-one
5 | five
M(2,3) | (2,3)
(2,3) | M(2,3)
-2 | \begin{vmatrix}1&2\\3&4\end{vmatrix}
-2 | \det\begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}2&1\\1&1\end{pmatrix}^{-1} | \begin{pmatrix}1&-1\\-1&2\end{pmatrix}
\begin{pmatrix}2&1\\1&1\end{pmatrix}^{2} | \begin{pmatrix}5&3\\3&2\end{pmatrix}
\begin{pmatrix}2\\1\end{pmatrix} | \begin{pmatrix}1&1\\0&1\end{pmatrix}\begin{pmatrix}1\\1\end{pmatrix}
\lfloor x \rfloor | -\lceil -x \rceil
\lfloor 2x \rfloor | \lfloor x \rfloor + \lfloor x + \frac12 \rfloor
\sum_{k=1}^n a_k | \sum_{j=1}^n a_j
\overline{2-5i} | 2+5i
2^{10} | 2^10
\text{no real roots} | no real root
\text{DNE} | does not exist
\text{infinitely many} | infinitely many solutions
\{2,-2\} | \{\pm 2\}
\{0,1,-1\} | \{0,\pm 1\}
\{1\pm\sqrt2\} | \{1+\sqrt2,1-\sqrt2\}
\frac{1}{2} \text{ or } 2 | x \in \{2, \frac12\}
\langle 1,-2,2\rangle | \mathbf{i}-2\mathbf{j}+2\mathbf{k}
2\hat{i}+3\hat{j} | \langle 2,3\rangle
(2,3,0) | 2\hat{\imath}+3\hat{\jmath}
25 | \ 25
11_2 | (11)_2
243_5 | 243_{\text{five}}
\frac{GMm}{r^2} | GMm\,r^{-2}
""",
    "letters that are multiplied before parentheses": r"""
\frac{m_1-m_2}{m_1+m_2}g | \frac{g(m_1-m_2)}{m_1+m_2}
gh - gk | g(h-k)
mg(h-k) | mgh-mgk
\frac{f+fx}{2} | \frac{f(1+x)}{2}
""",
    "statements of three words": r"""
\text{does not exist} | \text{Does not exist}
\text{does not exist} | DNE
""",
}

DIFFERENT = {
    "arguments of TeX": r"""
\frac{1}{n} | \frac n1
\frac{1}{12} | \frac112
\frac{\pi}{45} | \frac\pi45
\sqrt{12} | \sqrt12
\frac{x}{2y} | \frac x2y
x^{23} | x^2\cdot3
\binom{n}{2} | \binom 2n
\frac{a}{bc} | \frac abc
\sqrt{\frac12} | \frac{\sqrt1}{2}
\frac{13}{2} | \frac132
x^{nm} | x^nm
""",
    "scope of functions": r"""
\ln 6 | \ln 2 \cdot 3
\ln 6 | \ln{2}\cdot3
\sin 2x | \sin x \cdot 2
4 | \log_2 4 \cdot 4
\sin 60^\circ | \sin 30^\circ \cdot 2
\ln(x+1) | \ln x+1
\ln(2/3) | \ln 2/3
\sin x^2 | \sin x\cdot x
\sin^2 x | \sin x^2
\cos(x\cdot 3) | \cos x \cdot 3
\sin(x)y | \sin(xy)
\sin^{-1}x | \frac{1}{\sin x}
\log_2 8 | \log_8 2
\sqrt{2}x | \sqrt{2x}
\tan(x+y) | \tan x+y
\lg 8 | \ln 8
\log 100 | \ln 100
""",
    "looks": r"""
42 | \color{red}{43}
42 | \color{42}{4}
42 | \underline{4}2\underline{2}
42 | \phantom{4}2
42 | 4\phantom{2}
42 | \text{Answer: }43
42 | \text{Answer: not }42
42 | \text{Answer: }42 or 43
42 | 42\text{ (wrong)}
42 | 42\text{ (approximately)}
42 | \cancel{42}
42 | \mathbf{4}2\mathbf{3}
42 | 4{,}2
""",
    "letters": r"""
abc | abd
abc | ab
abc | a+b+c
xyz | xy
xyz | xyzz
lwh | lw+h
abc | a^2bc
ab | a/b
""",
    "words": r"""
dog | god
\text{dog} | god
no | on
\text{yes} | no
act | cat
listen | silent
ABC | ACB
BAD | DAB
Monday | Tuesday
\text{no solution} | solution
north | northeast
A | B
A | a
A, B | A
A | A, B
\text{Alice and Bob} | Alice
even | odd
true | false
""",
    "sets": r"""
\{1,2,3\} | \{1,2\}
\{1,2,3\} | \{1,2\}\cup\{4\}
\{1,2\} | (1,2)
\{1\} | 1
(1,2) | [1,2]
(0,1) | ]0,1]
[0,1[ | [0,1]
[-1,1] | |x|<1
[-1,1] | |x|\geq1
x\neq0 | x\neq1
x \ne 0 | \mathbb R
\mathbb{R}\setminus\{0\} | (0,\infty)
\mathbb{R} | \mathbb{Z}
\mathbb R | R
(2,\infty) | \{x \mid x\ge2\}
(2,\infty) | \{x \mid x<2\}
x>3 | y>3
x>3 | x<3
x>3 | 3
(1,5) | |x-3|<3
[0,3] | [0,1]\cup[2,3]
[0,3] | [0,1)\cup(1,3]
\emptyset | \{0\}
\emptyset | 0
x<1 \text{ or } x>3 | x<1 \text{ and } x>3
1<x<3 | x>1 \text{ or } x<3
-2<x<2 | x^2\le4
(0,1) | (1,0)
\{(1,2)\} | \{(2,1)\}
\{(1,2),(3,4)\} | \{(1,4),(3,2)\}
(-\infty,\sqrt2) | x<1.414
(-\infty,0)\cup(0,\infty) | (-\infty,\infty)
\{a,b\} | \{a,c\}
""",
    "tuples and matrices": r"""
(1,2) | (2,1)
(1,2) | (1,2,3)
\langle1,2\rangle | \langle2,1\rangle
(1,2) | 12
(1,2) | 1.2
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{vmatrix}1&2\\3&4\end{vmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}2&4\end{pmatrix} | 2\begin{pmatrix}1&4\end{pmatrix}
(x,y)=(1,2) | (x,y)=(2,1)
(x,y)=(1,2) | x=2,y=1
""",
    "systems and cases": r"""
x=1,y=2 | \begin{cases}x=2\\y=1\end{cases}
x=1,y=2 | x=1
\begin{cases}x=1\\y=2\end{cases} | x=1 \text{ or } y=2
\begin{cases}1 & x>0\\0 & x\le0\end{cases} | \begin{cases}1 & x\ge0\\0 & x<0\end{cases}
\begin{cases}1 & x>0\\0 & x\le0\end{cases} | \begin{cases}0 & x>0\\1 & x\le0\end{cases}
\begin{cases}1&x>0\\0&\text{otherwise}\end{cases} | \begin{cases}1&x\ge0\\0&\text{otherwise}\end{cases}
\begin{cases}1 & x>0\\0 & x\le0\end{cases} | 1
x=1,y=2 | x=1,z=2
""",
    "chains": r"""
0.5 | \frac12 = 0.6
0.5 | \frac13 = 0.5
0.5 | 0.6 = 0.6
\frac12 | \frac12 \approx 0.7
\frac12 | 0.5 = 0.5 = 0.6
5 | 2=3=5
5 | x=2=5
5 | 2+3=6
x=5 | y=5=6
x=5 | x=6
x+z=1 | 1
y=2x+1 | y=2x-1
x^2+y^2=1 | x^2+y^2=2
x^2+y^2=1 | 1
xy=5 | 5
x=1 | x=1 \text{ or } x=2
x=\pm2 | 2
f(2)=3 | f(3)=3
5 | 5 \ne 5
5 | x>5
3x+4y=7 | 3x+4y=8
x=y | x=-y
""",
    "units": r"""
60\text{ km/h} | 60\text{ mph}
5\text{ m} | 5\text{ cm}
5\text{ m/s} | 5\text{ m}\cdot\text{s}
5\text{ m/s} | 5\text{ m}\cdot\text{s}^{-2}
5\text{ m/s} | 5\text{ s/m}
45^\circ\text{C} | 45^\circ\text{F}
45^\circ\text{C} | 46^\circ\text{C}
8\text{ h} | 8\text{ min}
8\text{ h} | 8 m
8 | 8 h + 1
8 | 8x
8 | 8h
100\text{ cm} | 100\text{ m}
1\text{ m}^2 | 100\text{ cm}^2
5\text{ cm}^3 | 5\text{ cm}^2
90^\circ | 91^\circ
\frac{\pi}{3} | 61^\circ
3 | 3\text{ dozen}
3 | 3\text{ or so}
3 | 3\text{ halves}
3 | \text{about } 3
3 | 3\text{ million}
5 \text{ dollars} | 5 \text{ cents}
5 \text{ dollars} | 5 \text{ euros}
2\text{ million} | 2\text{ billion}
3\text{ apples} | 3\text{ pears}
\sin 30^\circ | \sin 30
""",
    "percent and numbers": r"""
50\% | 0.5
0.5 | 50\%
0.5 | 0.5\%
1 | 1\%
50\% | 5
1:2 | 2:4
4:3 | \frac43
1:2 | 2:1
1:2:3 | 1:3:2
1000 | 1,00
314 | 3{,}14
12 | 1 2
\frac13 | 0.\dot4
\frac13 | 0.33
\frac13 | 0.3\dot0
\frac16 | 0.\overline{16}
3.14 | 3.15
\pi | 3.14
\pi | \frac{22}{7}
2.5 | 2\cdot\frac12
1011_2 | 1011_3
1011_2 | 1011
204_5 | 204
42 | 42...
3 | 3.0000001
1 | 0.999999999
3 \pmod 7 | 3
3 \pmod 7 | 4 \pmod 7
3 \pmod 7 | 3 \pmod 8
x \equiv 3 \pmod 7 | x=3
3-2 | 1
2024-01-02 | 2021
-5 | 5
6 | 3!!
i | -i
2i | 2
\infty | -\infty
0 | \infty-\infty
1 | \frac{0}{0}
2^{100} | 2^{100}+1
10^{-20} | 10^{-21}
1 | 1+10^{-400}
""",
    "algebra": r"""
x^2-1 | (x-1)^2
(a+b)^2 | a^2+b^2
\frac{x}{2y} | x/2y
\sqrt{x^2} | x
\sqrt{x^2+y^2} | x+y
\ln x^2 | 2\ln x
\ln\frac ab | \ln a-\ln b
-2 | \sqrt[3]{-8}
2^{n+1} | 2^n+1
x^{a+b} | x^a+x^b
\sum_{k=1}^{n} k | \frac{n(n-1)}{2}
\sum_{i=1}^{10} i^2 | -10
\int_0^1 x^2 dx | \frac12
\int x dx | \frac{x^2}{2}
n! | n\cdot n!
(-1)^n | 1
(-1)^n | (-1)^{n+1}
(-1)^n | (-1)^{n(n+1)/2}
\cos n\pi | \cos 2n\pi
-x^2 | (-x)^2
|x| | x
f(x) | f(y)
f(x+y) | f(x)+f(y)
x_1 | x_2
x | X
\alpha | a
e | \epsilon
x | x+(x-\frac75)(x-\frac{23}9)(x+\frac{17}7)(x-\frac5{11})(x+\frac{31}{13})(x-\frac{43}6)
x | x+\sin(1000!\pi x)
x | x+|x+1000|-x-1000
x | \max(x,-100)
2^x | 2^x+10^{-300}
\sqrt2 | \sqrt2(1+10^{-300})
\sqrt2+\sqrt3 | \sqrt{5+2\sqrt6}+e^{-10000}
\lfloor x \rfloor | x
\frac{1}{x} | x^{-2}
1+2+\cdots+n | n+2+\cdots+1
\log_2 3 | \log_3 2
a\cdot b | a+b
""",
    "plain text": r"""
x-y | y-x
x-y | x+y
f'(x)=2x | f(x)=2x
\sin x | sinh x
cone | once
\text{cone} | once
2\sqrt3 | sqrt2*3
x^{n+1} | x^n+1
\frac{x+1}{2} | x+1/2
\sin 2x | sin(2)x
\pi | p
ab-cd | ab-c
""",
    "numbers and structures": r"""
1-1/e | 1
1 | 1+1/e
2^{-99} | 2^{-98}
10^{-20} | 10^{-30}
0.5 | 0.46
1/3 | 0.33
\sqrt{2} | 1.41
6 | 600
9 | 900
12 | 1,2
x^2 | x^3
\frac{1}{2} | \frac{2}{1}
204_5 | 204_7
5 \text{ m} | 5 \text{ cm}
(1,2) | \{1,2\}
\{1,2\} | \{1,2,3\}
[0,1] | (0,1]
x>3 | x \ge 3
3x+4y+14=0 | 3x-y+13=0
1,2,\ldots,n | 1,3,5,\ldots,2n-1
5 | 5 or 6
5 | 5, 6
5 | five apples and 6
\text{yes} | yes or no
3 | 3\text{ or 4}
3 | 3 \text{ is wrong, it is 4}
3 | 3 \text{ thousand}
3 | 3 billion
3 | 3 \text{ not}
3 | 3\text{ probably}
3 | 3\text{或者四}
3 | 3_4
3 | 3_{16}
3 | 3_{four}
3 | 3⟨4⟩
34 | 3\%4
2045 | 204₅
A | A_1
yes | yes \text{ or no}
x=1 | x=1\text{ or 2}
(1,2) | (1\text{ or 3},2)
(1,2,3) | (1 or 2, 3)
23 | 2³
10.5 | 2½
7 | 3(4)
1,2,3 | 1,2,3,...
1,2,3 | 1,2,3,\dots
1 | 1+10^{-41}
1 | 1+0.00000000000000000000000000000000000000001
x^2+1 | x^2+1+10^{-45}
\sqrt{2} | \sqrt{2}(1+10^{-300})
x = 1 or x = 2 | (1,2)
x = 1 or x = 2 | y=1, y=2
x = 1, 2 | (1,2)
1 or 2 | (1,2)
x=1, y=2 | 2, 1
""",
    "notation": r"""
100 | 1 00
21/2 | 2 1/2
12, 3 | 1 2, 3
f(2) = 3 | f(3) = 3
12cm | 12km
\cos 60^\circ | \cos 60
x<1 or x>3 | x<1 and x>3
x>1 and x<3 | x>1 or x<3
x \neq 1 \text{ and } x \neq 2 | x \neq 1 \text{ or } x \neq 2
x=1, y=2 | x=1 or y=2
(1,3) | x<1 \text{ or } x>3
2024-01-02 | 2024-02-01
192.168.0.1 | 192.168.0.2
12 | 1{,}2
80 | 1,080 dollars
80 | x = 1,080
1080 | (1,080)
1080 | x = 1, 080
1, 80 \text{ dollars} | 1,080 dollars
2 | 2^T
P(1+r)^T | P(1+r)
A^TB | AB
\frac{dy}{dx} = 2x | \frac{dx}{dy} = 2x
5\text{ m} | 5\text{ s}
f^{-1}(x)=x-1 | f(x)=x-1
\frac{x}{2} | \frac 2x
\frac{1}{2} | \sqrt\frac12
x^{\frac{1}{23}} | x^\frac123
42 | \color{42}{43}
42 | \textcolor{blue}{24}
42 | \large 43
43 | 42。
\frac12 | \frac13 \approx 0.5
\frac{1}{3} | 0.3\dot{0}
\frac{41}{333} | 0.\dot{1}3\dot{2}
3 | \dot3
""",
    "scope, both ways": r"""
\ln 6 | \ln{2} \cdot 3
\ln 6 | \ln 2 \times 3
\ln 6 | \ln 2 * 3
\ln 6 | \ln{2}3
\sin 2x | \sin{x} \cdot 2
\sin 2x | \sin{x}2
4 | \log_{2}{4} \times 4
\sin 60^\circ | \sin{30^\circ} \cdot 2
\sin x^2 | \sin x \cdot x
\sin x^2 | \sin^2 x
\sin x^2 | (\sin x)^2
\ln 2\ln 3 | \ln(2 \ln 3)
\cos 6x | \cos 2x \cdot 3
\cos 6x | \cos{2x} \cdot 3
\tan xy | \tan x \cdot y
\arctan 2x | \arctan x \cdot 2
\sin^{-1} 2x | \sin^{-1} x \cdot 2
e^{2x} | \exp x \cdot 2
\exp(2x) | \exp{x}\cdot 2
\sinh 2x | \sinh x \cdot 2
\operatorname{arsinh} 2x | \operatorname{arsinh} x \cdot 2
\log_{10} 300 | \log_{10} 100 \cdot 3
\lg 300 | \lg 100 \cdot 3
\log_2 8 | \log_3 8
\log_2 64 | \log_2^2 8
\ln 3 | \ln 6 / 2
\ln\frac{x}{2} | \ln x / 2
\ln x+1 | \ln(x+1)
\ln x-1 | \ln(x-1)
\ln(\ln x \cdot 2) | \ln\ln x \cdot 2
\sin(x(1+\cos x)) | \sin x(1+\cos x)
\frac{1}{\ln 6} | \frac{1}{\ln 2 \cdot 3}
6 | e^{\ln 2 \cdot 3}
\cos(r\theta) | \cos\theta \cdot r
\sin 15t | \sin 3t \cdot 5
\coth x | \cot x
\csch x | \csc x
\sech x | \sec x
\coth x | \tanh x
\sin^{-1} x | \frac{1}{\sin x}
\sin^{-2} x | \arcsin^2 x
-1 | \cos \pi \cdot 3
\cos 3 | \cos 1 \cdot 3
\sin(x+y) | \sin x + y
\ln|2x| | \ln|x| \cdot 2
""",
    "second reading": r"""
\dfrac{7}{2} | 3.6
\frac{3}{4} | \frac{3}{4}\text{ or } 0.8
5:30 | 5.5
5:30 | 5:03
120000 | 1.2e6
\frac{1}{2^n} | \frac{1}{2n}
n^2+n | n(n-1)
\binom{n}{k} | \frac{n!}{k!}
\ln\sqrt x | 2\ln x
\sin^2 x | \frac{1+\cos 2x}{2}
x\in[0,1] | 0<x<1
(2,3) | 2<x\le3
\{0,1\} | \{0\}
\{0,1\} | [0,1]
y=3x-5 | y=3x+5
y=3x-5 | x=3y-5
y=3x-5 | 3x+5
f(x)=2x+3 | f(x)=3x+2
f(x)=2x+3 | g(x)=2x+3
(x-1)^2+(y+2)^2=9 | (x-1)^2+(y+2)^2=3
a_n=2n+1 | a_{n+1}=2n+1
a_n=2n+1 | b_n=2n+1
B | \text{(D)}
B | \text{B or C}
B | ABCD
B | b
\text{True} | \text{not true}
\text{True} | \text{True or false}
36\text{ m}^2 | 36\text{ m}^3
36\text{ m}^2 | 36\text{ m}
15\text{ minutes} | 15\text{ hours}
3+4i | 3-4i
i | 1
(2,-3) | (-3,2)
(1,2),(3,4) | (1,2)
(1,2),(3,4) | (1,4),(3,2)
(1,2),(3,4) | (1,2,3,4)
x=1,3 | x=1
x=1,3 | (1,3)
\vec{v} = (1,2) | (2,1)
2^{\frac13} | \frac{2}{3}
x^{2/3} | x^2/3
\arctan 1 | 45
100! | 100\cdot98!
\lfloor \pi \rfloor | \pi
|x-1| | x-1
|x-1| | 1-|x|
\max(a,b) | \min(a,b)
\overline{AB} | AB
\overline{AB} | \overline{BA}
\triangle ABC | \triangle ACB
x=2k\pi | k\pi
\frac{\pi}{6}+2k\pi | \frac\pi6+k\pi
3^{2n} | 3^{n}\cdot 2
(-2)^n | -2^n
(-2)^n | 2^n
(-1)^n n | n
\sqrt{a^2b} | a\sqrt b
12.56 | 3\pi
12.56 | 12.5
0 | -1
0 | \frac{1}{10^{30}}
1 | 1 \ne 2
5 | 5=5=6
5 | x=5, y=6
5 | 5 \text{ and } 6
5 | 5 \text{ but maybe } 6
5 | 5 (or 6)
5 | 5?
5 | \pm5
5 | {5,6}
\pm 5 | 5
x<5 | x \le 5
x<5 | 5
\frac{1}{2} | 1/2/1/2
2 | 2^
2 | 2+
2 | 2 3
23 | 2 3
23 | 2\cdot 3
6 | 2 3
6 | 23
x | xx
x^2 | xx2
5x | 5
5x | x5
5x | 5y
abc | a b
10 | 1 0
10 | 1.0
1.0 | 10
1/2 | 1\2
3\pi | 3p
\pi | 3.14159
\pi | 3.14159265
\sqrt{2} | 1.4142
e | 2.718
\frac{1}{3} | 0.333
\frac13 | 33\%
\frac13 | 33.3\%
25\% | \frac14
7 | VII
A | \alpha
1 | l
0 | O
\infty | \text{undefined}
\emptyset | \{\emptyset\}
\mathbb{R} | x
\mathbb{R} | (-\infty, 0)
\mathbb{Z} | \mathbb{N}
\text{no solution} | \emptyset
5 \text{ cm} | 5 \text{ cm or } 6\text{ cm}
5 \text{ cm} | 5 \text{ kg}
100 | 100\text{ thousand}
2 \text{ weeks} | 2 \text{ days}
90^\circ | 90^\circ\text{C}
\sin 1 | \sin 1^\circ
\cos 60 | \frac12
\log_2 8 | \log 8
\ln x | \log x
f(2) | f(3)
f(x) | fx
f^{-1}(x) | \frac{1}{f(x)}
f'(x) | f(x)
\frac{dy}{dx} | \frac yx
\int x\,dx | \int y\,dx
\int x\,dx | \int x^2\,dx
\sum_{k=1}^{n} k | \sum_{k=1}^{n} n
\sum_{k=0}^{n} 1 | n
\prod_{k=1}^n k | n
\lim_{x\to 0} x | 1
x \equiv 3 \pmod 7 | x \equiv 4 \pmod 7
\gcd(12,18) | 36
1011_2 | 11
(0,\infty) | all real numbers
A \cup B | A \cap B
A \cup B | A
\begin{pmatrix}1&2\end{pmatrix} | (1,2)
\begin{pmatrix}1\end{pmatrix} | 1
x = \frac{1\pm\sqrt5}{2} | \frac{1+\sqrt5}{2}
10^{100} | 10^{100}+1
2^{1000} | 2^{1000}-1
\sqrt{10^{40}+1} | 10^{20}
0.1+0.2 | 0.30000000000000004
e^{\ln x} | x
12.56 | 4\pi
""",
    "third reading": r"""
72\text{ km/h} | 72\text{ m/s}
1\text{ kg} | 1\text{ g}
x^2\ge9 | x\ge3
x\ge0,x\ne1 | [0,\infty)
a<b | a>b
m=-1\text{ or }m=3 | m=-1
2x | 2^x
x^2 | 2^x
a^b | b^a
\sqrt{x+y} | \sqrt x+\sqrt y
\frac{1}{x+y} | \frac1x+\frac1y
\log(x+y) | \log x+\log y
(a+b)^3 | a^3+b^3
\frac{x+1}{x+2} | \frac12
10\text{ or }12 | 10\text{ and }13
0.\overline{9} | 0.9
\sum_{k=1}^n k^2 | \sum_{k=1}^n k^3
\sin x | \cos x
\arcsin x | \arccos x
\tan x | \cot x
e^x | e^{-x}
x^{1/3} | x^{1/2}
|x|+|y| | |x+y|
\lfloor x\rfloor | \lceil x\rceil
\lfloor x+1/2\rfloor | \lfloor x\rfloor
|x-50| | 50-x
\max(x,0) | \frac{x}{2}
\min(x,70) | x
|x-10^6| | 10^6-x
\lfloor\frac{x}{1000}\rfloor | 0
\sqrt{(x-3)^2} | x-3
3 | 3i
(1,2)\cup(3,4) | (1,4)
(1,2)\cap(3,4) | (1,2)
A\setminus B | B\setminus A
n\equiv1\pmod 2 | n\equiv1\pmod 4
\text{Tom} | \text{Tim}
4 \text{ men} | 4 \text{ women}
\sqrt{(x-70)^2} | 70-x
\sqrt{x^2-140x+4900} | 70-x
|x-2|+|x-3| | 2x-5
\max(x,y-100) | x
y=\sqrt{x} | y=2\sqrt x
\sqrt{x^2} | \frac{x^2}{x}
""",
    "fourth reading": r"""
5\text{ mV} | 5\text{ MV}
5 mW | 5 MW
4\ \Omega | 4\text{ k}\Omega
10 \text{ N} | 10\ \mathrm{kg\cdot m/s}
2 hours 15 minutes | 2 hours 51 minutes
3 apples, 2 apples | 5 apples
22^\circ30' | 22^\circ31'
120^\circ | \frac{2\pi}{5} \text{ rad}
£15 | 15 dollars
\$0.75 | 0.75 cents
€15 | \$15
3:30 PM | 3:30 AM
3:30 PM | 3:30
July 4, 1776 | July 5, 1776
July 4, 1776 | July 4, 1777
1:2 | 2 to 1
twelve | 20
M(2,3) | N(2,3)
A(1,2), B(3,4) | A(3,4), B(1,2)
f(2,3) | (2,3)
-2 | \begin{vmatrix}1&3\\2&4\end{vmatrix}+1
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&1\\0&1\end{pmatrix}\begin{pmatrix}1\\1\end{pmatrix}
\begin{pmatrix}2&1\\1&1\end{pmatrix}^{-1} | \begin{pmatrix}1&1\\1&2\end{pmatrix}
\lceil x \rceil | \lfloor x \rfloor + 1
\lceil \frac{2x}{3} \rceil | \lfloor \frac{2x}{3} \rfloor + 1
\sum_{k=1}^n a_k b_k | \sum_{k=1}^n a_k \sum_{k=1}^n b_k
\sum_{k=1}^n a_k | n a_k
\overline{2-5i} | 2-5i
\overline{AB} | \overline{BA}
x^{23} | x^23
x^{10}-1 | x^10-1
No solution | no
\{2, -2\} | \{\pm 3\}
\frac{1}{2} \text{ or } 2 | x \in \{2, \frac13\}
(2,3,1) | 2\hat{i}+3\hat{j}
(2,3) | 2+3i
T, F, T | T, T, F
True, False | \text{False, True}
[0, 1) | 0, 1
11_2 | (11)_3
""",
    "functions before parentheses": r"""
f(x+1) | f(x+2)
g(x)+1 | h(x)+1
f(2x+2) | 2f(x+1)
g + h | g(h)
f(2) | 2f
""",
}


def pairs(table: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (mechanism, reference, answer) of each line."""
    return [
        (mechanism, *line.split(" | "))
        for mechanism, lines in table.items()
        for line in lines.strip().split("\n")
    ]
